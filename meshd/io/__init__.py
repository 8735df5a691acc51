"""The I/O process: sockets, HTTP/1.1, and the life of one request."""
