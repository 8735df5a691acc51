from meshd.config.service_manager import ServiceManager, find_service_manager


def test_without_a_service_manager_there_is_nothing_to_tell() -> None:
    assert find_service_manager({}, 7) == ServiceManager(None, 0)
    assert find_service_manager({"NOTIFY_SOCKET": "", "WATCHDOG_USEC": "soon"}, 7) == ServiceManager(None, 0)


def test_socket_and_watchdog_are_found() -> None:
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}
    assert find_service_manager(environ, 7) == ServiceManager("@x", 30_000_000)


def test_the_watchdog_of_another_process_is_not_ours() -> None:
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}
    assert find_service_manager(environ, 7) == ServiceManager("@x", 0)
