/* The network between emulated hosts: each host is a namespace with one TUN device, and every packet passes here.
 *
 *   uplink (rate, drop-tail queue) -> pipe that paths share, if any -> path (one-way delay, random loss) -> downlink
 *
 * Reads commands on stdin, answers each with one line on stdout, ends when stdin does:
 *   host NETNS_PATH IPV4 UP_BYTES_PER_S DOWN_BYTES_PER_S UP_QUEUE_BYTES DOWN_QUEUE_BYTES ACCEPTS_INBOUND
 *   pipe BYTES_PER_S QUEUE_BYTES                  (numbered from 0)
 *   path FROM TO DELAY_US LOSS_PER_MILLION PIPE   (hosts by number, in order of `host`; PIPE -1: none)
 *   rates HOST UP_BYTES_PER_S DOWN_BYTES_PER_S    (from now on)
 *   link HOST UP                                  (0: black-holes it both ways)
 *   stats
 * IPv6 packets go to the host whose IPv4 address ends theirs. Rates count IP bytes. Segmentation offload stays on, so
 * that one system call moves up to 64 KiB; queues and losses act on the segments, as on a real wire. lab.py drives
 * this; it is compiled on first use.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { HOSTS_MAX = 128, PIPES_MAX = 64, FRAME_MAX = 66000, READS_PER_ROUND = 64 };
enum { PREFIX = sizeof(struct virtio_net_hdr) };
static const int64_t ROUND_NS = 500000; /* one wake-up serves many packets */

typedef struct {
  double bytes_per_s;
  int64_t queue_bytes, free_at;
  uint64_t passed_bytes, dropped;
} Pipe;

typedef struct {
  uint32_t address;
  int tun, is_up, accepts_inbound;
  Pipe up, down;
} Host;

typedef struct {
  int64_t delay_ns;
  double loss;
  int64_t clean_left; /* segments until the next loss */
  Pipe *pipe;         /* shared with other paths, or NULL */
} Path;

typedef enum { INTO_PIPE, ON_PATH, THROUGH_DOWNLINK } Stage;

typedef struct {
  int64_t at;
  uint64_t order;
  int from, to, length;
  Stage stage; /* where it is at the time `at` */
  uint8_t *bytes;
} Frame;

/* What is needed of a frame: header bytes per segment, payload, segments. */
typedef struct { int header, payload, per_segment, segments; } Shape;

static Host hosts[HOSTS_MAX];
static Path paths[HOSTS_MAX][HOSTS_MAX];
static int host_count;
static Pipe pipes[PIPES_MAX];
static int pipe_count;
static Frame *queue;
static size_t queued, queue_room;
static uint64_t next_order, lost, late_frames, frames;
static int64_t latest_ns;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static int is_sooner(const Frame *a, const Frame *b) { return a->at != b->at ? a->at < b->at : a->order < b->order; }

static void enqueue(Frame frame) {
  if (queued == queue_room) {
    queue_room = queue_room ? 2 * queue_room : 1024;
    queue = realloc(queue, queue_room * sizeof *queue);
    if (!queue) abort();
  }
  frame.order = next_order++;
  size_t place = queued++;
  for (; place > 0 && is_sooner(&frame, &queue[(place - 1) / 2]); place = (place - 1) / 2)
    queue[place] = queue[(place - 1) / 2];
  queue[place] = frame;
}

static Frame dequeue(void) {
  Frame first = queue[0], moved = queue[--queued];
  size_t place = 0;
  for (size_t child; (child = 2 * place + 1) < queued; place = child) {
    if (child + 1 < queued && is_sooner(&queue[child + 1], &queue[child])) child++;
    if (!is_sooner(&queue[child], &moved)) break;
    queue[place] = queue[child];
  }
  queue[place] = moved;
  return first;
}

/* Extension headers of IPv6 are not looked for: TCP sends none. */
static int ip_header_bytes(const uint8_t *ip) { return ip[0] >> 4 == 6 ? 40 : (ip[0] & 15) * 4; }

static Shape shape_of(const uint8_t *bytes, int length) {
  const struct virtio_net_hdr *offload = (const void *)bytes;
  const uint8_t *ip = bytes + PREFIX;
  Shape shape = {length - PREFIX, 0, 0, 1};
  int kind = offload->gso_type & ~VIRTIO_NET_HDR_GSO_ECN;
  if ((kind == VIRTIO_NET_HDR_GSO_TCPV4 || kind == VIRTIO_NET_HDR_GSO_TCPV6) && offload->gso_size) {
    int ip_header = ip_header_bytes(ip);
    shape.header = ip_header + (ip[ip_header + 12] >> 4) * 4;
    shape.payload = length - PREFIX - shape.header;
    shape.per_segment = offload->gso_size;
    shape.segments = (shape.payload + shape.per_segment - 1) / shape.per_segment;
    if (shape.segments < 1) shape.segments = 1;
  }
  return shape;
}

static int64_t wire_bytes(Shape shape) { return (int64_t)shape.segments * shape.header + shape.payload; }

static uint32_t sum_words(const uint8_t *bytes, int length, uint32_t sum) {
  for (int i = 0; i + 1 < length; i += 2) sum += (uint32_t)bytes[i] << 8 | bytes[i + 1];
  return sum;
}

static void put16(uint8_t *at, uint32_t value) { at[0] = value >> 8; at[1] = value; }

static uint16_t folded(uint32_t sum) {
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

/* A frame of its own with `count` of the segments of a larger one, from `first`. */
static Frame part_of(const Frame *whole, Shape shape, int first, int count) {
  int begin = first * shape.per_segment, end = begin + count * shape.per_segment;
  if (end > shape.payload) end = shape.payload;
  Frame part = *whole;
  part.length = PREFIX + shape.header + end - begin;
  part.bytes = malloc(part.length);
  if (!part.bytes) abort();
  memcpy(part.bytes, whole->bytes, PREFIX + shape.header);
  memcpy(part.bytes + PREFIX + shape.header, whole->bytes + PREFIX + shape.header + begin, end - begin);
  if (count == 1) {
    struct virtio_net_hdr *offload = (void *)part.bytes;
    offload->gso_type = VIRTIO_NET_HDR_GSO_NONE;
    offload->gso_size = 0;
  }
  uint8_t *ip = part.bytes + PREFIX;
  int ip_header = ip_header_bytes(ip), ip_length = part.length - PREFIX, is_six = ip[0] >> 4 == 6;
  uint8_t *tcp = ip + ip_header;
  uint32_t sequence;
  memcpy(&sequence, tcp + 4, 4);
  sequence = htonl(ntohl(sequence) + begin);
  memcpy(tcp + 4, &sequence, 4);
  if (is_six) {
    put16(ip + 4, ip_length - ip_header);
  } else {
    put16(ip + 2, ip_length);
    put16(ip + 4, ((ip[4] << 8 | ip[5]) + first) & 0xffff);
    put16(ip + 10, 0);
    put16(ip + 10, (uint16_t)~folded(sum_words(ip, ip_header, 0)));
  }
  if (end < shape.payload) tcp[13] &= ~0x09; /* FIN and PSH belong to the last segment, */
  if (first) tcp[13] &= ~0x80;               /* CWR to the first */
  uint32_t sum = 6 + ip_length - ip_header; /* the receiver trusts offload */
  put16(tcp + 16, folded(is_six ? sum_words(ip + 8, 32, sum) : sum_words(ip + 12, 8, sum)));
  return part;
}

/* Passes a frame through a rate and its queue; what does not fit is cut off. 0: nothing is left of it. */
static int pass(Pipe *pipe, Frame *frame) {
  Shape shape = shape_of(frame->bytes, frame->length);
  int64_t starts = frame->at > pipe->free_at ? frame->at : pipe->free_at;
  int64_t waiting = (int64_t)((starts - frame->at) * pipe->bytes_per_s / 1e9);
  if (waiting > 0 && waiting + wire_bytes(shape) > pipe->queue_bytes) {
    int64_t room = pipe->queue_bytes - waiting;
    int fitting = room <= 0 ? 0 : (int)(room / (shape.header + shape.per_segment));
    if (fitting > shape.segments) fitting = shape.segments;
    if (shape.segments == 1) fitting = 0;
    pipe->dropped += shape.segments - fitting;
    if (!fitting) { free(frame->bytes); return 0; }
    Frame kept = part_of(frame, shape, 0, fitting);
    free(frame->bytes);
    *frame = kept;
    shape = shape_of(frame->bytes, frame->length);
  }
  pipe->passed_bytes += wire_bytes(shape);
  pipe->free_at = starts + (int64_t)(wire_bytes(shape) * 1e9 / pipe->bytes_per_s);
  frame->at = pipe->free_at;
  return 1;
}

static void into_downlink(Frame frame) {
  frame.stage = THROUGH_DOWNLINK;
  if (pass(&hosts[frame.to].down, &frame)) enqueue(frame);
}

static void onto_path(Frame frame) {
  frame.at += paths[frame.from][frame.to].delay_ns;
  frame.stage = ON_PATH;
  enqueue(frame);
}

static int64_t draw_clean(double loss) { return (int64_t)(log(1.0 - drand48()) / log(1.0 - loss)); }

/* At the far end of its path: random losses take single segments out. */
static void off_the_path(Frame frame) {
  Path *path = &paths[frame.from][frame.to];
  if (path->loss <= 0) { into_downlink(frame); return; }
  Shape shape = shape_of(frame.bytes, frame.length);
  int begin = 0, at = 0;
  while (path->clean_left < shape.segments - at) {
    int hit = at + (int)path->clean_left;
    lost++;
    if (hit > begin) into_downlink(part_of(&frame, shape, begin, hit - begin));
    begin = at = hit + 1;
    path->clean_left = draw_clean(path->loss);
  }
  path->clean_left -= shape.segments - at;
  if (begin == 0) { into_downlink(frame); return; }
  if (begin < shape.segments) into_downlink(part_of(&frame, shape, begin, shape.segments - begin));
  free(frame.bytes);
}

static void from_host(int from, const uint8_t *bytes, int length, int64_t now) {
  const uint8_t *ip = bytes + PREFIX;
  int is_six = ip[0] >> 4 == 6;
  if (length < PREFIX + (is_six ? 40 : 20) || (!is_six && ip[0] >> 4 != 4)) return;
  uint32_t wanted;
  memcpy(&wanted, ip + (is_six ? 36 : 16), 4);
  int to = 0;
  while (to < host_count && hosts[to].address != wanted) to++;
  if (to == host_count || !hosts[from].is_up || !hosts[to].is_up) return;
  const uint8_t *tcp = ip + ip_header_bytes(ip);
  if (!hosts[to].accepts_inbound && ip[is_six ? 6 : 9] == 6 && (tcp[13] & 0x12) == 0x02) return; /* SYN without ACK */
  Frame frame = {.at = now, .from = from, .to = to, .length = length, .bytes = malloc(length)};
  if (!frame.bytes) abort();
  memcpy(frame.bytes, bytes, length);
  if (!pass(&hosts[from].up, &frame)) return;
  if (paths[from][to].pipe) enqueue(frame); /* in the order in which frames leave their uplinks */
  else onto_path(frame);
}

static void deliver(Frame frame, int64_t now) {
  frames++;
  if (now - frame.at > 5000000) late_frames++;
  if (now - frame.at > latest_ns) latest_ns = now - frame.at;
  if (hosts[frame.to].is_up && write(hosts[frame.to].tun, frame.bytes, frame.length) < 0) lost++;
  free(frame.bytes);
}

static int open_tun(const char *namespace) {
  int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), there = open(namespace, O_RDONLY | O_CLOEXEC);
  if (home < 0 || there < 0 || setns(there, CLONE_NEWNET)) return -1;
  int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), prefix = PREFIX;
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
  strcpy(request.ifr_name, "wan0");
  if (tun < 0 || ioctl(tun, TUNSETIFF, &request) || ioctl(tun, TUNSETVNETHDRSZ, &prefix) ||
      ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6))
    return -1;
  if (setns(home, CLONE_NEWNET)) return -1;
  close(home);
  close(there);
  return tun;
}

static int add_host(const char *namespace, const char *address, const double *numbers) {
  if (host_count == HOSTS_MAX) return 0;
  Host *host = &hosts[host_count];
  *host = (Host){.address = inet_addr(address), .is_up = 1, .accepts_inbound = numbers[4] != 0};
  host->up = (Pipe){.bytes_per_s = numbers[0], .queue_bytes = (int64_t)numbers[2]};
  host->down = (Pipe){.bytes_per_s = numbers[1], .queue_bytes = (int64_t)numbers[3]};
  host->tun = open_tun(namespace);
  if (host->tun < 0) return 0;
  host_count++;
  return 1;
}

static void tell_stats(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  double cpu_s = used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
  printf("{\"cpu_s\":%.3f,\"frames\":%llu,\"late_frames\":%llu,\"latest_ms\":%.3f,\"lost\":%llu,\"hosts\":[", cpu_s,
         (unsigned long long)frames, (unsigned long long)late_frames, latest_ns / 1e6, (unsigned long long)lost);
  for (int i = 0; i < host_count; i++)
    printf("%s{\"up_bytes\":%llu,\"down_bytes\":%llu,\"up_dropped\":%llu,\"down_dropped\":%llu}", i ? "," : "",
           (unsigned long long)hosts[i].up.passed_bytes, (unsigned long long)hosts[i].down.passed_bytes,
           (unsigned long long)hosts[i].up.dropped, (unsigned long long)hosts[i].down.dropped);
  printf("],\"pipes\":[");
  for (int i = 0; i < pipe_count; i++)
    printf("%s{\"bytes\":%llu,\"dropped\":%llu}", i ? "," : "", (unsigned long long)pipes[i].passed_bytes,
           (unsigned long long)pipes[i].dropped);
  printf("]}\n");
}

/* What waits goes on at the new rate. */
static void set_rate(Pipe *pipe, double bytes_per_s) {
  int64_t now = now_ns();
  if (pipe->free_at > now) pipe->free_at = now + (int64_t)((pipe->free_at - now) * pipe->bytes_per_s / bytes_per_s);
  pipe->bytes_per_s = bytes_per_s;
}

static void command(const char *line) {
  char namespace[256], address[64];
  int first, second, is_good = 0;
  double n[5];
  if (sscanf(line, "host %255s %63s %lf %lf %lf %lf %lf", namespace, address, n, n + 1, n + 2, n + 3, n + 4) == 7) {
    is_good = add_host(namespace, address, n);
  } else if (sscanf(line, "pipe %lf %lf", n, n + 1) == 2 && pipe_count < PIPES_MAX) {
    pipes[pipe_count++] = (Pipe){.bytes_per_s = n[0], .queue_bytes = (int64_t)n[1]};
    is_good = 1;
  } else if (sscanf(line, "rates %d %lf %lf", &first, n, n + 1) == 3 && first >= 0 && first < host_count) {
    set_rate(&hosts[first].up, n[0]);
    set_rate(&hosts[first].down, n[1]);
    is_good = 1;
  } else if (sscanf(line, "path %d %d %lf %lf %lf", &first, &second, n, n + 1, n + 2) == 5 && first >= 0 &&
             second >= 0 && first < host_count && second < host_count && n[2] < pipe_count) {
    Path *path = &paths[first][second];
    *path = (Path){(int64_t)(n[0] * 1000), n[1] / 1e6, 0, n[2] < 0 ? NULL : &pipes[(int)n[2]]};
    if (path->loss > 0) path->clean_left = draw_clean(path->loss);
    is_good = 1;
  } else if (sscanf(line, "link %d %d", &first, &second) == 2 && first >= 0 && first < host_count) {
    hosts[first].is_up = second != 0;
    is_good = 1;
  } else if (!strncmp(line, "stats", 5)) {
    tell_stats();
    fflush(stdout);
    return;
  }
  puts(is_good ? "ok" : "refused");
  fflush(stdout);
}

/* Commands that have come in whole; 0 at the end of input. */
static int take_commands(void) {
  static char text[65536];
  static size_t held;
  ssize_t got = read(0, text + held, sizeof text - 1 - held);
  if (got <= 0) return 0;
  held += got;
  text[held] = 0;
  char *begin = text;
  for (char *end; (end = strchr(begin, '\n')); begin = end + 1) {
    *end = 0;
    command(begin);
  }
  held = strlen(begin);
  memmove(text, begin, held + 1);
  return held < sizeof text - 1;
}

int main(void) {
  static uint8_t buffer[FRAME_MAX + PREFIX];
  struct pollfd watched[HOSTS_MAX + 1];
  struct sched_param priority = {.sched_priority = 10};
  if (sched_setscheduler(0, SCHED_FIFO, &priority)) setpriority(PRIO_PROCESS, 0, -20);
  prctl(PR_SET_TIMERSLACK, 1);
  srand48(7);
  int64_t round = now_ns();
  for (;;) {
    int64_t now = now_ns();
    while (queued && queue[0].at <= now + ROUND_NS / 2) {
      Frame frame = dequeue();
      if (frame.stage == THROUGH_DOWNLINK) deliver(frame, now);
      else if (frame.stage == ON_PATH) off_the_path(frame);
      else if (pass(paths[frame.from][frame.to].pipe, &frame)) onto_path(frame);
    }
    for (int i = 0; i < host_count; i++) watched[i] = (struct pollfd){.fd = hosts[i].tun, .events = POLLIN};
    watched[host_count] = (struct pollfd){.fd = 0, .events = POLLIN};
    round = round + ROUND_NS > now ? round + ROUND_NS : now;
    if (queued) {
      struct timespec until = {round / 1000000000ll, round % 1000000000ll};
      clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    }
    if (poll(watched, host_count + 1, queued ? 0 : 100) <= 0) continue;
    now = now_ns();
    for (int i = 0; i < host_count; i++)
      for (int k = 0; watched[i].revents & POLLIN && k < READS_PER_ROUND; k++) {
        ssize_t length = read(hosts[i].tun, buffer, sizeof buffer);
        if (length <= 0) break;
        from_host(i, buffer, (int)length, now - ROUND_NS / 2);
      }
    if (watched[host_count].revents && !take_commands()) return 0;
  }
}
