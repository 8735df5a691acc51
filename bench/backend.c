/* The upstream of the benchmark: one thread, one epoll, two listeners, no heap use per request.
 *
 *   backend [EVENTS_PER_SECOND]
 *
 * Binds two free ports of 127.0.0.1 and prints {"ports":[P,Q]} as its first line. Ends when stdin closes,
 * so that it cannot outlive the benchmark.
 *
 *   POST /v1/completions reads the body (content-length only; chunks are refused), answers a completion of a fixed number of
 *                       bytes whose prompt_tokens is the number of body bytes received;
 *                       with "stream":true within the first 255 bytes of the body: "max_tokens" events
 *                       as server-sent events, EVENTS_PER_SECOND (default 100) each second, each with its
 *                       send time "t" in ns (CLOCK_MONOTONIC)
 *   POST anything else  404, counted apart: a router that asks more of its upstreams than it was asked
 *   GET /stats          counters as JSON, so that the benchmark can check what really arrived
 *   GET …_info          what a server tells of itself (/get_server_info, /server_info, /get_model_info)
 *   GET anything else   a model list (/v1/models, and health probes, which want a 200 alone)
 *
 * Every stream has its own phase, so a relay sees single events, not bursts of all streams.
 * An event sent 5 ms or more after its time counts as late: then the backend was short of CPU, not the relay.
 * An event whose stream is still blocked by the reader is skipped and counted, never queued without bound.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FDS = 65536, HEAD_BYTES = 16384, PEEK_BYTES = 255, PENDING_BYTES = 4096, READ_BYTES = 262144 };
enum { NS_PER_S = 1000000000, TICK_NS = 1000000, LATE_NS = 5000000 };

struct connection {
    int is_open, listener, wants_close, is_get, is_stats, is_info, is_other, is_stream;
    size_t head_length;               /* bytes of an unfinished head */
    size_t body_length, body_left;    /* body_left > 0: inside a body */
    size_t peek_length;
    size_t pending_length;            /* bytes that the socket did not take yet */
    size_t stream_slot;
    uint64_t events_left, due_ns;
    char head[HEAD_BYTES];
    char peek[PEEK_BYTES + 1];
    char pending[PENDING_BYTES];
};

static struct connection *connections[MAX_FDS];
static int streams[MAX_FDS];
static size_t stream_count;
static int listeners[2], epoll_fd, timer_fd;
static uint64_t period_ns = NS_PER_S / 100;
static uint64_t requests[2], body_bytes[2], bad_requests, other_requests, streams_started, events_sent, events_skipped, events_late;
static char read_buffer[READ_BYTES];

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * NS_PER_S + (uint64_t)time.tv_nsec;
}

static void watch(int fd, uint32_t events, int operation) {
    struct epoll_event event = {.events = events, .data.fd = fd};
    epoll_ctl(epoll_fd, operation, fd, &event);
}

static void arm_timer(long interval_ns) {
    struct itimerspec spec = {{0, interval_ns}, {0, interval_ns}};
    timerfd_settime(timer_fd, 0, &spec, NULL);
}

static void leave_streams(struct connection *connection) {
    if (!connection->is_stream) return;
    connection->is_stream = 0;
    int last = streams[--stream_count];
    streams[connection->stream_slot] = last;
    connections[last]->stream_slot = connection->stream_slot;
    if (stream_count == 0) arm_timer(0);
}

static void drop(int fd) {
    leave_streams(connections[fd]);
    connections[fd]->is_open = 0;
    close(fd);
}

/* Send, keeping what the socket does not take. Returns 0 when the connection was dropped. */
static int put(int fd, const char *data, size_t length) {
    struct connection *connection = connections[fd];
    ssize_t sent = 0;
    if (connection->pending_length == 0) {
        sent = send(fd, data, length, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) return drop(fd), 0;
            sent = 0;
        }
        if ((size_t)sent == length) return 1;
    }
    size_t rest = length - (size_t)sent;
    if (connection->pending_length + rest > PENDING_BYTES) return drop(fd), 0;
    memcpy(connection->pending + connection->pending_length, data + sent, rest);
    connection->pending_length += rest;
    watch(fd, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
    return 1;
}

static void put_pending(int fd) {
    struct connection *connection = connections[fd];
    ssize_t sent = send(fd, connection->pending, connection->pending_length, MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno != EAGAIN) drop(fd);
        return;
    }
    connection->pending_length -= (size_t)sent;
    memmove(connection->pending, connection->pending + sent, connection->pending_length);
    if (connection->pending_length == 0) watch(fd, EPOLLIN, EPOLL_CTL_MOD);
}

static int put_response(int fd, const char *status, const char *body, int body_length) {
    char out[PENDING_BYTES];
    int length = snprintf(out, sizeof out,
                          "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%.*s", status,
                          body_length, body_length, body);
    return put(fd, out, (size_t)length);
}

static int put_completion(int fd) {
    char body[512];
    int length = snprintf(body, sizeof body,
                          "{\"id\":\"cmpl-0123456789abcdef\",\"object\":\"text_completion\",\"created\":1700000000,"
                          "\"model\":\"m1\",\"choices\":[{\"index\":0,\"text\":\" and so it was that the sixteen "
                          "tokens came back at last to the one who asked\",\"logprobs\":null,\"finish_reason\":"
                          "\"length\"}],\"usage\":{\"prompt_tokens\":%12zu,\"completion_tokens\":16}}",
                          connections[fd]->body_length);
    return put_response(fd, "200 OK", body, length);
}

static int put_get(int fd) {
    static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"m1\",\"object\":\"model\"}]}";
    static const char info[] = "{\"model_path\":\"m1\",\"model_id\":\"m1\",\"served_model_name\":\"m1\","
                               "\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.0\"}";
    if (connections[fd]->is_info) return put_response(fd, "200 OK", info, sizeof info - 1);
    if (!connections[fd]->is_stats) return put_response(fd, "200 OK", models, sizeof models - 1);
    char body[512];
    int length = snprintf(body, sizeof body,
                          "{\"requests\":[%lu,%lu],\"body_bytes\":[%lu,%lu],\"bad_requests\":%lu,"
                          "\"other_requests\":%lu,\"streams_started\":%lu,\"events_sent\":%lu,\"events_skipped\":%lu,\"events_late\":%lu}",
                          requests[0], requests[1], body_bytes[0], body_bytes[1], bad_requests, other_requests, streams_started,
                          events_sent, events_skipped, events_late);
    return put_response(fd, "200 OK", body, length);
}

static int start_stream(int fd) {
    static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                               "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
    struct connection *connection = connections[fd];
    const char *count = strstr(connection->peek, "\"max_tokens\":");
    connection->events_left = count ? strtoull(count + 13, NULL, 10) : 16;
    /* a phase of its own: golden-ratio steps spread any number of streams evenly over the period */
    connection->due_ns = now_ns() + (streams_started++ * 618034 % 1000000) * period_ns / 1000000;
    if (!put(fd, head, sizeof head - 1)) return 0;
    connection->is_stream = 1;
    connection->stream_slot = stream_count;
    streams[stream_count++] = fd;
    if (stream_count == 1) arm_timer(TICK_NS);
    return 1;
}

static void put_event(int fd, uint64_t now) {
    struct connection *connection = connections[fd];
    if (now - connection->due_ns > LATE_NS) events_late++;
    connection->due_ns += period_ns;
    if (connection->pending_length) {
        events_skipped++;
        return;
    }
    char event[320], out[512];
    int length = snprintf(event, sizeof event,
                          "data: {\"id\":\"cmpl-0123456789abcdef\",\"object\":\"text_completion\",\"model\":\"m1\","
                          "\"t\":%lu,\"choices\":[{\"index\":0,\"text\":\" token\",\"finish_reason\":null}]}\n\n",
                          now);
    length = snprintf(out, sizeof out, "%x\r\n%s\r\n", length, event);
    events_sent++;
    if (!put(fd, out, (size_t)length)) return;
    if (--connection->events_left == 0) {
        static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
        leave_streams(connection);
        put(fd, end, sizeof end - 1);
    }
}

static void tick(void) {
    uint64_t expirations, now = now_ns();
    if (read(timer_fd, &expirations, sizeof expirations) < 0) return;
    /* from the end: a stream that leaves is replaced by the last one, which had its turn */
    for (size_t slot = stream_count; slot-- > 0;)
        if (connections[streams[slot]]->due_ns <= now) put_event(streams[slot], now);
}

/* Answer the request whose body is complete. Returns 0 when the connection is gone. */
static int answer(int fd) {
    struct connection *connection = connections[fd];
    int is_alive;
    connection->peek[connection->peek_length] = 0;
    if (connection->is_get) {
        is_alive = put_get(fd);
    } else if (connection->is_other) {
        static const char unknown[] = "{\"error\":\"no such route\"}";
        other_requests++;
        is_alive = put_response(fd, "404 Not Found", unknown, sizeof unknown - 1);
    } else {
        requests[connection->listener]++;
        body_bytes[connection->listener] += connection->body_length;
        is_alive = strstr(connection->peek, "\"stream\":true") ? start_stream(fd) : put_completion(fd);
    }
    if (is_alive && connection->wants_close && !connection->is_stream) {
        drop(fd);
        return 0;
    }
    return is_alive;
}

static const char *find_header(const char *head, const char *name) {
    size_t length = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line && line[2]; line = strstr(line + 2, "\r\n"))
        if (strncasecmp(line + 2, name, length) == 0) return line + 2 + length;
    return NULL;
}

static int begin_request(int fd) {
    struct connection *connection = connections[fd];
    const char *head = connection->head, *length = find_header(head, "content-length:");
    const char *close_mark = find_header(head, "connection:");
    connection->is_get = strncmp(head, "GET ", 4) == 0;
    connection->is_stats = strncmp(head, "GET /stats ", 11) == 0;
    const char *path_end = strstr(head, " HTTP/");
    connection->is_info = connection->is_get && path_end && path_end - head > 9 && strncmp(path_end - 5, "_info", 5) == 0;
    connection->is_other = !connection->is_get && strncmp(head, "POST /v1/completions ", 21) != 0;
    connection->wants_close = close_mark && strncasecmp(close_mark + strspn(close_mark, " "), "close", 5) == 0;
    connection->body_length = connection->body_left = length ? strtoull(length, NULL, 10) : 0;
    connection->peek_length = 0;
    if (!connection->is_get && !length && find_header(head, "transfer-encoding:")) {
        static const char refusal[] = "{\"error\":\"this backend needs a content-length\"}";
        bad_requests++;
        if (put_response(fd, "411 Length Required", refusal, sizeof refusal - 1)) drop(fd);
        return 0;
    }
    if (find_header(head, "expect:") && !put(fd, "HTTP/1.1 100 Continue\r\n\r\n", 25)) return 0;
    return connection->body_left > 0 || answer(fd);
}

/* Take what belongs to the head out of data; the count of bytes taken, or -1 when the connection is gone. */
static ssize_t take_head(int fd, const char *data, size_t length) {
    struct connection *connection = connections[fd];
    size_t before = connection->head_length, room = HEAD_BYTES - 1 - before;
    size_t copied = length < room ? length : room;
    memcpy(connection->head + before, data, copied);
    connection->head[before + copied] = 0;
    size_t from = before > 3 ? before - 3 : 0; /* the blank line may straddle two reads */
    char *end = strstr(connection->head + from, "\r\n\r\n");
    if (!end) {
        connection->head_length = before + copied;
        if (connection->head_length == HEAD_BYTES - 1) return bad_requests++, drop(fd), -1;
        return (ssize_t)copied;
    }
    end[4] = 0;
    connection->head_length = 0;
    size_t taken = (size_t)(end + 4 - connection->head) - before;
    return begin_request(fd) ? (ssize_t)taken : -1;
}

static ssize_t take_body(int fd, const char *data, size_t length) {
    struct connection *connection = connections[fd];
    size_t taken = length < connection->body_left ? length : connection->body_left;
    size_t room = PEEK_BYTES - connection->peek_length, peeked = taken < room ? taken : room;
    memcpy(connection->peek + connection->peek_length, data, peeked);
    connection->peek_length += peeked;
    connection->body_left -= taken;
    if (connection->body_left == 0 && !answer(fd)) return -1;
    return (ssize_t)taken;
}

static void take(int fd) {
    ssize_t length = read(fd, read_buffer, READ_BYTES);
    if (length <= 0) {
        if (length == 0 || errno != EAGAIN) drop(fd);
        return;
    }
    for (ssize_t at = 0; at < length;) {
        const char *data = read_buffer + at;
        size_t rest = (size_t)(length - at);
        ssize_t taken = connections[fd]->body_left ? take_body(fd, data, rest) : take_head(fd, data, rest);
        if (taken < 0) return;
        at += taken;
    }
}

static void accept_all(int listener) {
    int fd, on = 1;
    while ((fd = accept4(listeners[listener], NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_FDS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        if (!connections[fd]) connections[fd] = malloc(sizeof *connections[fd]);
        struct connection *connection = connections[fd];
        memset(connection, 0, offsetof(struct connection, head));
        connection->is_open = 1;
        connection->listener = listener;
        watch(fd, EPOLLIN, EPOLL_CTL_ADD);
    }
}

static int open_listener(int *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(fd, (struct sockaddr *)&address, length) || listen(fd, 4096)) {
        perror("backend: cannot listen");
        exit(1);
    }
    getsockname(fd, (struct sockaddr *)&address, &length);
    *port = ntohs(address.sin_port);
    watch(fd, EPOLLIN, EPOLL_CTL_ADD);
    return fd;
}

int main(int argc, char **argv) {
    int ports[2];
    if (argc > 1 && atol(argv[1]) > 0) period_ns = NS_PER_S / (uint64_t)atol(argv[1]);
    epoll_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    watch(timer_fd, EPOLLIN, EPOLL_CTL_ADD);
    watch(STDIN_FILENO, EPOLLIN, EPOLL_CTL_ADD);
    for (int i = 0; i < 2; i++) listeners[i] = open_listener(&ports[i]);
    printf("{\"ports\":[%d,%d]}\n", ports[0], ports[1]);
    fflush(stdout);
    for (;;) {
        struct epoll_event events[256];
        int count = epoll_wait(epoll_fd, events, 256, -1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == STDIN_FILENO) return 0;
            if (fd == timer_fd) tick();
            else if (fd == listeners[0] || fd == listeners[1]) accept_all(fd == listeners[1]);
            else {
                /* a stale event of a connection dropped earlier in this batch finds it closed, or finds a new
                   connection under the same number, for which reading gives EAGAIN and nothing happens */
                if (connections[fd]->is_open && events[i].events & EPOLLOUT) put_pending(fd);
                if (connections[fd]->is_open && events[i].events & ~(uint32_t)EPOLLOUT) take(fd);
            }
        }
    }
}
