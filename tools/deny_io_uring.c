/* Runs a command in which the three io_uring system calls answer EPERM, as under Docker's default seccomp
   profile: cc -o deny_io_uring deny_io_uring.c && ./deny_io_uring python ...
   Exit status 126: this system does not let us install the filter. Called by tests/io. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <unistd.h>

/* io_uring_setup, _enter, _register: the same numbers on every architecture. */
enum { FIRST = 425, LAST = 427 };

int main(int argc, char** argv) {
  if (argc < 2) return 125;
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, FIRST, 0, 2),
      BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, LAST, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 126;
  execvp(argv[1], argv + 1);
  return 127;
}
