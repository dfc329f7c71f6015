/* The terms of a sum, a block at a time: in memory, or in files that are read meanwhile. So is the
 * result: in memory, or in a file that is written meanwhile.
 *
 * A block of all terms, and of the result, stays in the cache of a processor until it has been used.
 */
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>

/* Where the elements of a term are: at `values`, or if there is a `path` in that file from `offset`
 * on, if the file still has its device, number, length and time. */
struct term {
    const char *values, *path;
    int64_t stamp[4], offset;
};

/* Where the elements of the result go: to `values`, or if that is NULL to a file from `offset` on;
 * with `finite` only if they all are. */
struct result {
    char *values;
    int64_t offset;
    int file, finite;
};

enum {
    ROOM = 5 << 17,    /* bytes of all terms together, and of the result, at a time */
    LEAST = 1 << 14,   /* elements of one term, if there are many */
    WRITTEN = 1 << 16, /* bytes; for more, Linux takes large pages, which may be slow to come */
};

struct reader {
    const struct term *terms;
    int count, *files;
    ptrdiff_t size, block; /* bytes of an element, elements of a block */
    char *room;
    const void **at; /* where the block of every term is */
    char *result;    /* where a block of the result goes that is written */
};

#if defined(_WIN32)
static int open_term(const struct term *term) { return -1; }
static int read_term(int file, char *to, ptrdiff_t size, int64_t offset) { return 0; }
static int write_bytes(int file, const char *from, ptrdiff_t size, int64_t offset) { return 0; }
static void close_term(int file) {}
#else
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>
#if defined(__APPLE__)
#define MODIFIED st_mtimespec
#else
#define MODIFIED st_mtim
#endif

static int open_term(const struct term *term) {
    struct stat now;
    int file = open(term->path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    if (fstat(file, &now) == 0) {
        int64_t time = (int64_t)now.MODIFIED.tv_sec * 1000000000 + now.MODIFIED.tv_nsec;
        const int64_t stamp[4] = {(int64_t)now.st_dev, (int64_t)now.st_ino, now.st_size, time};
        if (memcmp(stamp, term->stamp, sizeof stamp) == 0) return file;
    }
    close(file);
    return -1;
}

static int read_term(int file, char *to, ptrdiff_t size, int64_t offset) {
    for (ptrdiff_t done = 0; done < size;) {
        ssize_t count = pread(file, to + done, (size_t)(size - done), offset + done);
        if (count <= 0) return 0;
        done += count;
    }
    return 1;
}

/* One thread at a time, as the system would have it, but those that wait do so without work. */
static int write_bytes(int file, const char *from, ptrdiff_t size, int64_t offset) {
    static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
    int whole = 1;
    pthread_mutex_lock(&writing);
    for (ptrdiff_t done = 0; whole && done < size;) {
        ptrdiff_t some = size - done < WRITTEN ? size - done : WRITTEN;
        ssize_t count = pwrite(file, from + done, (size_t)some, offset + done);
        whole = count > 0;
        done += count;
    }
    pthread_mutex_unlock(&writing);
    return whole;
}

static void close_term(int file) {
    if (file >= 0) close(file);
}
#endif

static void close_terms(struct reader *reader) {
    for (int t = 0; reader->files && t < reader->count; t++) close_term(reader->files[t]);
    free(reader->files);
    free(reader->at);
    free(reader->room);
}

/* Be ready to read terms of `size` elements, and to have a block of the result if that is `written`;
 * tell whether that can be. */
static int open_terms(struct reader *reader, int type, const struct term *terms, int count,
                      ptrdiff_t size, int written) {
    int stored = 0, opened = 1;
    *reader = (struct reader){terms, count, NULL, type == F32 ? 4 : type == I8 ? 1 : 2, size,
                              NULL, NULL, NULL};
    reader->files = malloc((size_t)count * sizeof *reader->files);
    reader->at = malloc((size_t)count * sizeof *reader->at);
    for (int t = 0; reader->files && t < count; t++) {
        reader->files[t] = terms[t].path ? open_term(terms + t) : -1;
        stored += terms[t].path != NULL;
        opened &= !terms[t].path || reader->files[t] >= 0;
    }
    int blocks = stored + written;
    if (blocks) {
        reader->block = ROOM / blocks / reader->size / LEAST * LEAST;
        if (reader->block < LEAST) reader->block = LEAST;
        reader->room = malloc((size_t)(blocks * reader->block * reader->size));
        if (written) reader->result = reader->room + stored * reader->block * reader->size;
    }
    if (opened && reader->files && reader->at && (reader->room || !blocks)) return 1;
    close_terms(reader);
    return 0;
}

/* Have `some` elements of all terms, from `first` on, at reader->at; tell whether they are. */
static int read_terms(struct reader *reader, ptrdiff_t first, ptrdiff_t some) {
    char *room = reader->room;
    for (int t = 0; t < reader->count; t++) {
        const struct term *term = reader->terms + t;
        reader->at[t] = term->path ? room : term->values + first * reader->size;
        if (!term->path) continue;
        if (!read_term(reader->files[t], room, some * reader->size,
                       term->offset + first * reader->size))
            return 0;
        room += reader->block * reader->size;
    }
    return 1;
}

static int all_finite(int type, const char *values, ptrdiff_t size) {
    int found = 0;
    if (type == F32) {
        const uint32_t *bits = (const uint32_t *)values;
        for (ptrdiff_t i = 0; i < size; i++) found |= (bits[i] & 0x7f800000) == 0x7f800000;
    } else {
        const uint16_t *bits = (const uint16_t *)values, exponent = type == BF16 ? 0x7f80 : 0x7c00;
        for (ptrdiff_t i = 0; i < size; i++) found |= (bits[i] & exponent) == exponent;
    }
    return !found;
}

/* Write a block of the result, which begins at element `first`; tell whether it was. */
static int write_result(const struct reader *reader, int type, const struct result *to,
                        ptrdiff_t first, ptrdiff_t some) {
    if (to->finite && !all_finite(type, reader->result, some)) return 0;
    return write_bytes(to->file, reader->result, some * reader->size,
                       to->offset + first * reader->size);
}
