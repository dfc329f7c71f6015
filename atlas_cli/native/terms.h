/* The terms of a sum, one block at a time: all in memory, or all in files.
 *
 * Files are read with pread into a block per term, instead of being mapped: a block of all terms
 * stays in the cache of the processor until it has been used, and there are no page faults. Every
 * function that can fail returns 0 then, and the caller falls back to torch.
 */
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>

/* Where terms are. In memory: `values` has their addresses. In files: `values` is NULL, and term t
 * begins at `offsets[t]` of `paths[t]`. `stamps` has four numbers per file (device, inode, length
 * and time of change in nanoseconds), which tell whether it is still the file whose header was read. */
struct places {
    const char *const *values, *const *paths;
    const int64_t *stamps, *offsets;
};

enum {
    ROOM = 5 << 17,  /* bytes of the blocks of all terms together: they fit into a level 2 cache */
    LEAST = 1 << 14, /* elements of a block if there are many terms; a multiple of SUMMED */
};

struct reader {
    struct places places;
    int count, *files;
    ptrdiff_t size, block; /* bytes of an element, elements of a block */
    char *room;
    const void **at; /* where the block of every term is */
};

#if defined(_WIN32) /* has no pread: terms in files are left to torch */
static int open_term(const char *path, const int64_t *stamp) { return -1; }
static int read_term(int file, char *to, ptrdiff_t size, int64_t offset) { return 0; }
static void close_term(int file) {}
#else
#include <fcntl.h>
#include <unistd.h>
#if defined(__APPLE__)
#define MODIFIED st_mtimespec
#else
#define MODIFIED st_mtim
#endif

static int open_term(const char *path, const int64_t *stamp) {
    struct stat now;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    if (fstat(file, &now) == 0) {
        int64_t time = (int64_t)now.MODIFIED.tv_sec * 1000000000 + now.MODIFIED.tv_nsec;
        const int64_t found[4] = {(int64_t)now.st_dev, (int64_t)now.st_ino, now.st_size, time};
        if (memcmp(found, stamp, sizeof found) == 0) return file;
    }
    close(file);
    return -1;
}

/* pread may return fewer bytes than asked for; 0 means that the file has become shorter. */
static int read_term(int file, char *to, ptrdiff_t size, int64_t offset) {
    for (ptrdiff_t done = 0; done < size;) {
        ssize_t count = pread(file, to + done, (size_t)(size - done), offset + done);
        if (count <= 0) return 0;
        done += count;
    }
    return 1;
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

/* Prepare to go through terms of `size` elements; return 0 if that is not possible. */
static int open_terms(struct reader *reader, int type, struct places places, int count,
                      ptrdiff_t size) {
    int opened = 1;
    *reader = (struct reader){places, count, NULL, SIZE_OF(type), size, NULL, NULL};
    reader->at = malloc((size_t)count * sizeof *reader->at);
    if (!places.values) {
        reader->block = ROOM / count / reader->size / LEAST * LEAST;
        if (reader->block < LEAST) reader->block = LEAST;
        reader->room = malloc((size_t)(count * reader->block * reader->size));
        reader->files = malloc((size_t)count * sizeof *reader->files);
        for (int t = 0; reader->files && t < count; t++) {
            reader->files[t] = open_term(places.paths[t], places.stamps + 4 * t);
            opened &= reader->files[t] >= 0;
        }
    }
    if (opened && reader->at && (places.values || (reader->room && reader->files))) return 1;
    close_terms(reader);
    return 0;
}

/* Have `some` elements of every term, from element `first` on, at reader->at. */
static int read_terms(struct reader *reader, ptrdiff_t first, ptrdiff_t some) {
    for (int t = 0; t < reader->count; t++) {
        ptrdiff_t before = first * reader->size;
        if (reader->places.values) {
            reader->at[t] = reader->places.values[t] + before;
            continue;
        }
        char *room = reader->room + t * reader->block * reader->size;
        reader->at[t] = room;
        if (!read_term(reader->files[t], room, some * reader->size,
                       reader->places.offsets[t] + before))
            return 0;
    }
    return 1;
}
