/* What a file system promises about files that are open, mapped, renamed or removed. Prints one line per case,
 * `name: result`, with results that do not depend on where it runs; a test compares the lines of two file systems.
 * Runs in the current directory, which holds base/ (see tests/open_files.rs): files that a branch has from its base. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

static const char *current = "";

static void say(const char *format, ...) {
    va_list args;
    printf("%s: ", current);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
}

/* 0 or more: the result; less: the name of the error. */
static const char *result(long value) {
    static char text[4][64];
    static int next;
    char *out = text[next = (next + 1) % 4];
    if (value < 0)
        snprintf(out, sizeof text[0], "%s", strerrorname_np(errno));
    else
        snprintf(out, sizeof text[0], "%ld", value);
    return out;
}

static void put(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0 || write(fd, text, strlen(text)) < 0 || close(fd) < 0)
        say("put %s: %s", path, strerrorname_np(errno));
}

static const char *get_fd(int fd) {
    static char text[4][256];
    static int next;
    char *out = text[next = (next + 1) % 4];
    ssize_t n = pread(fd, out, sizeof text[0] - 1, 0);
    if (n < 0)
        return strerrorname_np(errno);
    out[n] = 0;
    return out;
}

static const char *get(const char *path) {
    int fd = open(path, O_RDONLY);
    if (fd < 0)
        return strerrorname_np(errno);
    const char *text = get_fd(fd);
    close(fd);
    return text;
}

static int entries(const char *path) {
    DIR *dir = opendir(path);
    int n = 0;
    if (!dir)
        return -1;
    for (struct dirent *e; (e = readdir(dir));)
        n += strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
    closedir(dir);
    return n;
}

/* Each case runs on a new file and on a file of the base: overlay file systems treat them differently. */
static void unlinked(const char *path) {
    int fd = open(path, O_RDWR);
    struct stat st;
    say("unlink %s", result(unlink(path)));
    say("write %s", result(pwrite(fd, "DEAD", 4, 0)));
    say("read %s", get_fd(fd));
    fstat(fd, &st);
    say("links %ld size %ld", (long)st.st_nlink, (long)st.st_size);
    put(path, "a new file");
    say("write again %s", result(pwrite(fd, "GHOST", 5, 0)));
    say("new file %s", get(path));
    say("old file %s", get_fd(fd));
    say("grow %s", result(ftruncate(fd, 100000)));
    say("link back %s", result(linkat(AT_FDCWD, path, AT_FDCWD, "linked-back", 0)));
    close(fd);
    say("new file after close %s", get(path));
    unlink("linked-back");
    unlink(path);
}

static void renamed(const char *path) {
    int fd = open(path, O_RDWR);
    say("rename %s", result(rename(path, "renamed")));
    say("write %s", result(pwrite(fd, "MOVED", 5, 0)));
    say("by new name %s", get("renamed"));
    say("by old name %s", get(path));
    put("other", "the other");
    int old = open("renamed", O_RDONLY);
    say("rename over %s", result(rename("other", "renamed")));
    say("old descriptor %s, name %s", get_fd(old), get("renamed"));
    say("write to the replaced %s", result(pwrite(fd, "LOST!", 5, 0)));
    say("name still %s", get("renamed"));
    close(fd);
    close(old);
    unlink("renamed");
}

static void reader_before_writer(const char *path) {
    int reader = open(path, O_RDONLY);
    struct stat before, after;
    stat(path, &before);
    int writer = open(path, O_RDWR);
    say("write %s", result(pwrite(writer, "FRESH", 5, 0)));
    say("reader %s", get_fd(reader));
    fstat(reader, &after);
    say("same inode %d size %ld", before.st_ino == after.st_ino, (long)after.st_size);
    stat(path, &after);
    say("same inode by name %d", before.st_ino == after.st_ino);
    close(writer);
    close(reader);
}

static void mapped(const char *path) {
    int fd = open(path, O_RDWR);
    ftruncate(fd, 8192);
    char *map = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        say("mmap %s", strerrorname_np(errno));
        return;
    }
    memcpy(map, "BY MAP", 7);
    say("read %s", get(path));
    pwrite(fd, "BY FD!", 7, 4096);
    say("map %s", map + 4096);
    say("unlink %s", result(unlink(path)));
    memcpy(map, "UNSEEN", 7);
    say("map of the deleted %s", get_fd(fd));
    put(path, "a new file");
    memcpy(map, "GHOST!", 7);
    say("new file %s", get(path));
    say("msync %s", result(msync(map, 8192, MS_SYNC)));
    munmap(map, 8192);
    say("after munmap %s", get_fd(fd));
    close(fd);
    unlink(path);
}

static void mapped_before_write(const char *path) {
    int reader = open(path, O_RDONLY);
    char *map = mmap(0, 4096, PROT_READ, MAP_SHARED, reader, 0);
    int writer = open(path, O_RDWR);
    pwrite(writer, "WRITE", 5, 0);
    say("read-only map sees %.5s", map == MAP_FAILED ? "nothing" : map);
    close(writer);
    close(reader);
}

static void appended(const char *path) {
    int a = open(path, O_WRONLY | O_APPEND), b = open(path, O_WRONLY | O_APPEND);
    struct stat st;
    stat(path, &st);
    long before = st.st_size;
    for (int i = 0; i < 10; i++) {
        write(a, "a", 1);
        write(b, "b", 1);
    }
    stat(path, &st);
    char text[21] = {0};
    int r = open(path, O_RDONLY);
    pread(r, text, 20, before);
    say("grew %ld: %s", (long)st.st_size - before, text);
    close(a);
    close(b);
    close(r);
}

static void emptied(const char *path) {
    DIR *lister = opendir(path), *other = opendir(path);
    int seen = 0, removed = 0;
    say("first of the other %d", readdir(other) != 0);
    for (struct dirent *e; (e = readdir(lister));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        seen++;
        removed += !unlinkat(dirfd(lister), e->d_name, 0);
    }
    say("seen %d removed %d", seen, removed);
    rewinddir(other);
    int left = 0;
    while (readdir(other))
        left++;
    say("left %d", left - 2);
    closedir(lister);
    closedir(other);
    say("rmdir %s", result(rmdir(path)));
}

static void directories(const char *path) {
    char file[256];
    snprintf(file, sizeof file, "%s/inner/file", path);
    int fd = open(file, O_RDWR), dir = open(path, O_RDONLY | O_DIRECTORY);
    say("rename %s", result(rename(path, "moved")));
    say("write %s", result(pwrite(fd, "IN DIR", 6, 0)));
    say("by new name %s", get("moved/inner/file"));
    int inner = openat(dir, "inner/file", O_RDONLY);
    say("by descriptor %s", inner < 0 ? strerrorname_np(errno) : get_fd(inner));
    say("rmdir full %s", result(rmdir("moved")));
    say("unlink %s", result(unlink("moved/inner/file")));
    say("rmdir inner %s", result(rmdir("moved/inner")));
    say("rmdir %s", result(rmdir("moved")));
    say("create in the removed %s", result(openat(dir, "x", O_CREAT | O_WRONLY, 0644)));
    say("deleted file %s", get_fd(fd));
    say("make again %s", result(mkdir("moved", 0755)));
    say("it is empty %d", entries("moved"));
    rmdir("moved");
    close(fd);
    close(dir);
    if (inner >= 0)
        close(inner);
}

static void replaced_by_other_kinds(const char *path) {
    say("unlink %s", result(unlink(path)));
    say("mkdir %s", result(mkdir(path, 0755)));
    say("open as file %s", get(path));
    say("entries %d", entries(path));
    say("rename a file over it %s", (put("f", "f"), result(rename("f", path))));
    say("rmdir %s", result(rmdir(path)));
    say("symlink %s", result(symlink("f", path)));
    say("through it %s", get(path));
    say("O_NOFOLLOW %s", result(open(path, O_RDONLY | O_NOFOLLOW)));
    say("unlink %s", result(unlink(path)));
    say("fifo %s", result(mkfifo(path, 0644)));
    say("writer without reader %s", result(open(path, O_WRONLY | O_NONBLOCK)));
    unlink(path);
    unlink("f");
}

static void locked(const char *path) {
    int a = open(path, O_RDWR);
    say("flock %s", result(flock(a, LOCK_EX | LOCK_NB)));
    int b = open(path, O_RDWR);
    say("second flock %s", result(flock(b, LOCK_EX | LOCK_NB)));
    pwrite(b, "x", 1, 0);
    rename(path, "locked");
    int c = open("locked", O_RDWR);
    say("third, by a new name %s", result(flock(c, LOCK_EX | LOCK_NB)));
    close(a);
    say("after close %s", result(flock(c, LOCK_EX | LOCK_NB)));
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 10};
    say("fcntl %s", result(fcntl(b, F_SETLK, &lock)));
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        int d = open("locked", O_RDWR);
        say("fcntl in a child %s", result(fcntl(d, F_SETLK, &lock)));
        fflush(stdout);
        _exit(0);
    }
    waitpid(child, 0, 0);
    close(b);
    close(c);
    unlink("locked");
}

static void attributes(const char *path) {
    struct stat st;
    struct timespec times[2] = {{1000000000, 123456789}, {1000000001, 987654321}};
    say("utimensat %s", result(utimensat(AT_FDCWD, path, times, 0)));
    stat(path, &st);
    say("mtime %ld.%09ld", (long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
    say("chmod %s", result(chmod(path, 0604)));
    stat(path, &st);
    say("mode %o", st.st_mode & 07777);
    char value[16] = {0};
    say("setxattr %s", result(setxattr(path, "user.colour", "red", 3, 0)));
    say("getxattr %s %s", result(getxattr(path, "user.colour", value, sizeof value)), value);
    say("truncate %s", result(truncate(path, 3)));
    say("content %s", get(path));
}

static void links(const char *path) {
    struct stat a, b;
    say("link %s", result(link(path, "second")));
    int fd = open("second", O_WRONLY);
    pwrite(fd, "LINKED", 6, 0);
    close(fd);
    stat(path, &a);
    stat("second", &b);
    say("same file %d links %ld: %s", a.st_ino == b.st_ino, (long)a.st_nlink, get(path));
    unlink(path);
    stat("second", &b);
    say("links %ld", (long)b.st_nlink);
    say("content %s", get("second"));
    unlink("second");
}

static void special_calls(void) {
    current = "O_TMPFILE";
    int fd = open(".", O_TMPFILE | O_RDWR, 0644);
    say("open %d", fd >= 0);
    if (fd >= 0) {
        char name[64];
        write(fd, "from nowhere", 12);
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        say("link %s", result(linkat(AT_FDCWD, name, AT_FDCWD, "tmpfile", AT_SYMLINK_FOLLOW)));
        say("content %s", get("tmpfile"));
        close(fd);
        unlink("tmpfile");
    }
    current = "renameat2";
    put("one", "1");
    put("two", "2");
    say("noreplace %s", result(renameat2(AT_FDCWD, "one", AT_FDCWD, "two", RENAME_NOREPLACE)));
    say("exchange %s", result(renameat2(AT_FDCWD, "one", AT_FDCWD, "two", RENAME_EXCHANGE)));
    say("contents %s %s", get("one"), get("two"));
    current = "copy_file_range";
    int in = open("one", O_RDONLY), out = open("three", O_RDWR | O_CREAT, 0644);
    say("copied %s", result(copy_file_range(in, 0, out, 0, 100, 0)));
    say("content %s", get("three"));
    close(in);
    close(out);
    current = "sparse";
    fd = open("sparse", O_RDWR | O_CREAT, 0644);
    say("pwrite far %s", result(pwrite(fd, "end", 3, 5L << 30)));
    struct stat st;
    fstat(fd, &st);
    say("size %lld, small on disk %d", (long long)st.st_size, st.st_blocks < 100);
    say("first hole %s", result(lseek(fd, 0, SEEK_HOLE)));
    close(fd);
    unlink("one"), unlink("two"), unlink("three"), unlink("sparse");
}

static void errors(void) {
    char name[300];
    current = "errors";
    memset(name, 'n', sizeof name);
    name[255] = 0;
    say("255 bytes %d", (put(name, "x"), access(name, F_OK)));
    unlink(name);
    memset(name, 'n', sizeof name);
    name[256] = 0;
    say("256 bytes %s", result(open(name, O_CREAT | O_WRONLY, 0644)));
    symlink("loop-b", "loop-a");
    symlink("loop-a", "loop-b");
    say("loop %s", get("loop-a"));
    put("plain", "x");
    say("below a file %s", get("plain/x"));
    say("exclusive %s", result(open("plain", O_CREAT | O_EXCL | O_WRONLY, 0644)));
    say("rmdir a file %s", result(rmdir("plain")));
    mkdir("dir", 0755);
    say("unlink a directory %s", result(unlink("dir")));
    say("rename below itself %s", result(rename("dir", "dir/in")));
    say("write to a directory %s", result(open("dir", O_WRONLY)));
    say("missing %s", get("missing"));
    say("odd name %d", (put("new\nline \xff", "x"), access("new\nline \xff", F_OK)));
    mkdir("gone", 0755);
    int back = open(".", O_RDONLY);
    chdir("gone");
    rmdir("../gone");
    say("getcwd in a removed directory %s", getcwd(name, sizeof name) ? "works" : strerrorname_np(errno));
    fchdir(back);
    close(back);
    unlink("loop-a"), unlink("loop-b"), unlink("plain"), unlink("new\nline \xff"), rmdir("dir");
}

/* Runs `body` on a new file `fresh` and on the base's file `base/NAME`. */
static void both(const char *name, void (*body)(const char *)) {
    char label[128], path[128];
    snprintf(label, sizeof label, "%s, new file", name);
    current = label;
    put("fresh", "first content");
    body("fresh");
    unlink("fresh");
    snprintf(label, sizeof label, "%s, file of the base", name);
    snprintf(path, sizeof path, "base/%s", name);
    body(path);
}

int main(void) {
    both("unlinked", unlinked);
    both("renamed", renamed);
    both("reader", reader_before_writer);
    both("mapped", mapped);
    both("mapped-before", mapped_before_write);
    both("appended", appended);
    both("replaced", replaced_by_other_kinds);
    both("locked", locked);
    both("attributes", attributes);
    both("links", links);
    current = "directory, new";
    mkdir("newdir", 0755), mkdir("newdir/inner", 0755), put("newdir/inner/file", "content");
    directories("newdir");
    current = "directory of the base";
    directories("base/dir");
    current = "emptied, new";
    mkdir("list", 0755);
    for (int i = 0; i < 20000; i++) {
        char path[64];
        snprintf(path, sizeof path, "list/entry-%05d", i);
        int fd = open(path, O_CREAT | O_WRONLY, 0644);
        if (fd < 0)
            say("create %s", strerrorname_np(errno));
        close(fd);
    }
    emptied("list");
    current = "emptied, of the base";
    emptied("base/list");
    special_calls();
    errors();
    return 0;
}
