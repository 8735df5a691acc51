"""A DNS server on a UDP port of loopback that answers from a table; it can be silent or fail."""

from __future__ import annotations

import socket
import threading
from typing import Self

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer:
    """``records``: (name, type) to (TTL, texts); no texts: the name exists, without records of this type.

    ``faults``: (name, type) to a response code, or None for silence. Names end in a dot.
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.faults: dict[tuple[str, str], dns.rcode.Rcode | None] = {}
        self.asked: list[tuple[str, str]] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join(10)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            data, peer = self._socket.recvfrom(4096)
            if not data:
                return
            answer = self._answer(dns.message.from_wire(data))
            if answer is not None:
                self._socket.sendto(answer.to_wire(), peer)

    def _answer(self, question: dns.message.Message) -> dns.message.Message | None:
        asked = question.question[0]
        name, record_type = asked.name.to_text().lower(), dns.rdatatype.to_text(asked.rdtype)
        self.asked.append((name, record_type))
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.RA
        if (name, record_type) in self.faults:
            code = self.faults[name, record_type]
            if code is None:
                return None
            answer.set_rcode(code)
            return answer
        if not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        owner = asked.name
        if (name, "CNAME") in self.records:
            ttl, texts = self.records[name, "CNAME"]
            answer.answer.append(dns.rrset.from_text_list(owner, ttl, "IN", "CNAME", texts))
            owner = dns.name.from_text(texts[0])
        ttl, texts = self.records.get((owner.to_text().lower(), record_type), (0, []))
        if texts:
            answer.answer.append(dns.rrset.from_text_list(owner, ttl, "IN", record_type, texts))
        else:
            soa = "ns.example. root.example. 1 3600 600 86400 7"
            answer.authority.append(dns.rrset.from_text("example.", 300, "IN", "SOA", soa))
        return answer
