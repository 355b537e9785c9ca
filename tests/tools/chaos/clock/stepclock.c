/* The wall clock of one process, stepped from outside: preload this, and name in STEPCLOCK_FILE a file of eight bytes, a
 * signed count of nanoseconds in the machine's own byte order, which is added to CLOCK_REALTIME.
 *
 * As when NTP or a person sets a clock, only the wall clock jumps: monotonic clocks, sleeps and timeouts go on as they
 * were. (libfaketime 0.9.10 moves those too, or breaks Python's absolute sleeps when told not to.) The file is mapped
 * once, so a step costs the process nothing and takes effect at the next look at the clock.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
  const char *name = getenv("STEPCLOCK_FILE");
  int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;

  real_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  if (file < 0)
    return;
  void *mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED)
    offset = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!real_gettime)
    start();
  int answer = real_gettime(clock, now);
  if (answer == 0 && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t all = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + *offset;
    now->tv_sec = all / 1000000000;
    now->tv_nsec = all % 1000000000;
  }
  return answer;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &precise) != 0)
    return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out)
    *out = now.tv_sec;
  return now.tv_sec;
}
