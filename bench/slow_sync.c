/* A library for LD_PRELOAD that counts the syncs of processes, and may delay each.

   SYNC_COUNT is the path of a file with 8 zero bytes, the counter that all processes
   share. SYNC_DELAY is the delay of each sync in microseconds. With SYNC_ALONE=1 the syncs
   of all processes wait for each other, as on many disks: a lock on the file of the
   counter, opened anew each time, so that it holds between threads, too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

static int (*next_fdatasync)(int);
static int (*next_fsync)(int);
static _Atomic unsigned long *count;
static useconds_t delay;
static const char *path, *alone;

__attribute__((constructor)) static void start(void) {
    const char *microseconds = getenv("SYNC_DELAY");
    path = getenv("SYNC_COUNT");
    alone = getenv("SYNC_ALONE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *page = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (page != MAP_FAILED) count = page;
    if (fd >= 0) close(fd);
    delay = microseconds ? (useconds_t)atoi(microseconds) : 0;
    next_fdatasync = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    next_fsync = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
}

static int slow_sync(int (*sync)(int), int fd) {
    int lock = path && alone ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (lock >= 0) flock(lock, LOCK_EX);
    if (count) atomic_fetch_add(count, 1);
    if (delay) usleep(delay);
    int result = sync(fd);
    if (lock >= 0) close(lock);
    return result;
}

int fdatasync(int fd) { return slow_sync(next_fdatasync, fd); }

int fsync(int fd) { return slow_sync(next_fsync, fd); }
