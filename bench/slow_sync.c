/* A disk whose every sync takes 2 ms longer: LD_PRELOAD=slow_sync.so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

int fdatasync(int fd) {
    static int (*next)(int);
    if (!next) next = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    usleep(2000);
    return next(fd);
}
