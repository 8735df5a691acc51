/* The load generator for streams: N connections that each hold one server-sent event stream after another.
 *
 *   load PORT STREAMS EVENTS_PER_STREAM SECONDS
 *
 * Opens the streams, prints "started" once every one has delivered an event, counts for SECONDS, prints one
 * line of JSON, and keeps its connections until stdin closes (so that tearing them down is not measured).
 *
 * The latency of an event is now - "t", where "t" is the send time that the backend wrote into it: both read
 * CLOCK_MONOTONIC of the same machine. One thread; per event it costs the decoding of some 170 bytes.
 *
 * Decoding is strict: status 200, chunked framing, events that end in a blank line, and [DONE] at the end.
 * Anything else counts as an error, and an error makes the round invalid.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LINE_BYTES = 2048, READ_BYTES = 65536, START_SECONDS = 30, NS_PER_S = 1000000000 };
enum { BUCKET_US = 10, BUCKETS = 200000 }; /* 10 µs buckets up to 2 s; the last holds the rest */
enum part { HEAD, SIZE, DATA, DATA_END, TRAILER };

struct line {
    size_t length;
    char text[LINE_BYTES];
};

struct stream {
    int fd, has_event, is_done, has_failed;
    enum part part;
    size_t chunk_left;
    struct line frame, event; /* apart, because a relay may cut an event anywhere with its own chunks */
};

static struct sockaddr_in target;
static char request[1024];
static size_t request_length;
static int epoll_fd;
static size_t with_event;
static uint64_t errors, events, finished, bytes, latency_max_us, latency_sum_us, buckets[BUCKETS];
static char first_error[160];

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * NS_PER_S + (uint64_t)time.tv_nsec;
}

static void fail(struct stream *stream, const char *what) {
    if (errors++ == 0) {
        snprintf(first_error, sizeof first_error, "%.159s", what);
        for (char *at = first_error; *at; at++)
            if (*at == '"' || *at == '\\' || *at < ' ') *at = '?'; /* it goes into JSON as it is */
    }
    stream->has_failed = 1;
    close(stream->fd);
}

static void send_request(struct stream *stream) {
    stream->part = HEAD;
    stream->frame.length = stream->event.length = 0;
    stream->is_done = 0;
    if (send(stream->fd, request, request_length, MSG_NOSIGNAL) != (ssize_t)request_length)
        fail(stream, "the request could not be sent");
}

static void open_stream(struct stream *stream) {
    int on = 1;
    stream->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(stream->fd, (struct sockaddr *)&target, sizeof target)) return fail(stream, "no connection");
    setsockopt(stream->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(stream->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = stream};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, stream->fd, &event);
    send_request(stream);
}

static void take_event_line(struct stream *stream, uint64_t now) {
    const char *text = stream->event.text;
    if (stream->event.length == 0) return;
    if (strncmp(text, "data: ", 6) != 0) return fail(stream, "a line that is not data");
    if (strcmp(text + 6, "[DONE]") == 0) {
        stream->is_done = 1;
        return;
    }
    const char *sent = strstr(text, "\"t\":");
    if (!sent) return fail(stream, "an event without its send time");
    uint64_t latency_us = (now - strtoull(sent + 4, NULL, 10)) / 1000, bucket = latency_us / BUCKET_US;
    buckets[bucket < BUCKETS ? bucket : BUCKETS - 1]++;
    latency_sum_us += latency_us;
    if (latency_us > latency_max_us) latency_max_us = latency_us;
    events++;
    if (!stream->has_event) {
        stream->has_event = 1;
        with_event++;
    }
}

/* One line of head, chunk size or trailer. */
static void take_frame_line(struct stream *stream) {
    const char *text = stream->frame.text;
    int is_empty = stream->frame.length == 0;
    char *end;
    switch (stream->part) {
    case HEAD:
        if (strncmp(text, "HTTP/", 5) == 0 && strncmp(text + 8, " 200", 4) != 0) return fail(stream, text);
        if (is_empty) stream->part = SIZE;
        return;
    case SIZE:
        stream->chunk_left = strtoull(text, &end, 16);
        if (end == text) return fail(stream, "a chunk size that is not a number");
        stream->part = stream->chunk_left ? DATA : TRAILER;
        return;
    case DATA_END:
        if (!is_empty) return fail(stream, "a chunk longer than its size");
        stream->part = SIZE;
        return;
    default:
        if (!is_empty) return; /* a trailer field */
        if (!stream->is_done) return fail(stream, "the stream ended without [DONE]");
        finished++;
        send_request(stream);
    }
}

static void take_bytes(struct stream *stream, const char *data, size_t length, uint64_t now) {
    for (size_t at = 0; at < length && !stream->has_failed; at++) {
        int is_data = stream->part == DATA;
        struct line *line = is_data ? &stream->event : &stream->frame;
        if (is_data && --stream->chunk_left == 0) stream->part = DATA_END;
        if (data[at] != '\n') {
            if (line->length == LINE_BYTES - 1) return fail(stream, "a line that is too long");
            line->text[line->length++] = data[at];
            continue;
        }
        if (line->length && line->text[line->length - 1] == '\r') line->length--;
        line->text[line->length] = 0;
        if (is_data) take_event_line(stream, now);
        else take_frame_line(stream);
        line->length = 0;
    }
}

static void take(struct stream *stream) {
    static char buffer[READ_BYTES];
    ssize_t length = read(stream->fd, buffer, READ_BYTES);
    if (length < 0 && errno == EAGAIN) return;
    if (length <= 0) return fail(stream, "the connection ended inside a stream");
    bytes += (uint64_t)length;
    take_bytes(stream, buffer, (size_t)length, now_ns());
}

/* Read until the end, or until so many streams have either delivered an event or failed. */
static void run_until(uint64_t end_ns, size_t wanted) {
    struct epoll_event ready[256];
    uint64_t now;
    while ((now = now_ns()) < end_ns && with_event + errors < wanted) {
        int count = epoll_wait(epoll_fd, ready, 256, (int)((end_ns - now) / 1000000) + 1);
        for (int i = 0; i < count; i++) {
            struct stream *stream = ready[i].data.ptr;
            if (!stream->has_failed) take(stream);
        }
    }
}

static double percentile_us(double share) {
    uint64_t seen = 0;
    for (size_t bucket = 0; bucket < BUCKETS; bucket++)
        if ((seen += buckets[bucket]) >= (uint64_t)(share * (double)events)) return (double)(bucket * BUCKET_US + BUCKET_US / 2);
    return 0;
}

static double own_cpu_s(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static void measure(double seconds) {
    uint64_t began_ns = now_ns();
    double cpu_s = own_cpu_s();
    events = finished = bytes = latency_max_us = latency_sum_us = 0;
    memset(buckets, 0, sizeof buckets);
    run_until(began_ns + (uint64_t)(seconds * NS_PER_S), SIZE_MAX);
    printf("{\"seconds\":%.6f,\"events\":%lu,\"streams_finished\":%lu,\"bytes\":%lu,\"errors\":%lu,"
           "\"first_error\":\"%s\",\"mean_us\":%.0f,\"p50_us\":%.0f,\"p99_us\":%.0f,\"max_us\":%lu,\"cpu_s\":%.4f}\n",
           (double)(now_ns() - began_ns) / NS_PER_S, events, finished, bytes, errors, first_error,
           events ? (double)latency_sum_us / (double)events : 0.0, percentile_us(0.5),
           percentile_us(0.99), latency_max_us, own_cpu_s() - cpu_s);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc != 5) return fprintf(stderr, "usage: load PORT STREAMS EVENTS_PER_STREAM SECONDS\n"), 2;
    size_t count = (size_t)atol(argv[2]);
    char body[512];
    int body_length = snprintf(body, sizeof body,
                               "{\"model\":\"m1\",\"stream\":true,\"max_tokens\":%s,\"prompt\":\"Tell me about the sea, "
                               "and about the people who went out on it before there were maps.\"}",
                               argv[3]);
    request_length = (size_t)snprintf(request, sizeof request,
                                      "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:%s\r\ncontent-type: "
                                      "application/json\r\ncontent-length: %d\r\n\r\n%s",
                                      argv[1], body_length, body);
    target = (struct sockaddr_in){.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)atoi(argv[1])),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    epoll_fd = epoll_create1(0);
    struct stream *all = calloc(count, sizeof *all);
    for (size_t i = 0; i < count; i++) open_stream(&all[i]);
    run_until(now_ns() + (uint64_t)START_SECONDS * NS_PER_S, count);
    printf("started %zu\n", with_event);
    fflush(stdout);
    measure(atof(argv[4]));
    while (getchar() != EOF) {}
    return 0;
}
