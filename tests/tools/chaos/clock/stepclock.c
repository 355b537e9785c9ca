/* The wall clock of one process, stepped from outside: preload this, and name in STEPCLOCK_FILE a file of eight bytes, a
 * signed count of nanoseconds in the machine's own byte order, which is added to CLOCK_REALTIME.
 *
 * As when NTP or a person sets a clock, only the wall clock jumps: monotonic clocks, sleeps and timeouts go on as they
 * were. (libfaketime 0.9.10 moves those too, or breaks Python's absolute sleeps when told not to.) The file is mapped
 * once, so a step costs the process nothing and takes effect at the next look at the clock.
 *
 * Who waits for a condition until a time by the wall clock took that time from the stepped clock, and the kernel counts by
 * its own: the step is taken away again, or librdkafka would wait for as long as the clock was stepped.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_c11_wait)(cnd_t *, mtx_t *, const struct timespec *);
/* A monotonic clock counts from the start of the machine, and is never so high. */
static const time_t earliest_wall_time = 1000000000;

__attribute__((constructor)) static void start(void) {
  const char *name = getenv("STEPCLOCK_FILE");
  int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;

  real_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  /* Where there are two versions of it, the former one is for conditions of another layout. */
  real_wait = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlvsym(
      RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!real_wait)
    real_wait = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlsym(
        RTLD_NEXT, "pthread_cond_timedwait");
  real_c11_wait = (int (*)(cnd_t *, mtx_t *, const struct timespec *))dlsym(RTLD_NEXT, "cnd_timedwait");
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

static struct timespec take_step_away(const struct timespec *until) {
  struct timespec real = *until;
  if (offset && until->tv_sec > earliest_wall_time) {
    int64_t all = (int64_t)until->tv_sec * 1000000000 + until->tv_nsec - *offset;
    real.tv_sec = all / 1000000000;
    real.tv_nsec = all % 1000000000;
  }
  return real;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  if (!real_wait)
    start();
  struct timespec real = take_step_away(until);
  return real_wait(condition, mutex, &real);
}

int cnd_timedwait(cnd_t *restrict condition, mtx_t *restrict mutex, const struct timespec *restrict until) {
  if (!real_c11_wait)
    start();
  struct timespec real = take_step_away(until);
  return real_c11_wait(condition, mutex, &real);
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
