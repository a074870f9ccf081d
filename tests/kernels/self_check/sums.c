/* Tests the collectives between processes, without a Python interpreter. `run.sh` runs this program for any processor. All
 * data are whole numbers, so that every sum is exact in every type. */

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../../parallelformers_ng/collectives/_kernel.c"

/* Python functions that a long wait calls. Here no thread holds the GIL, and no signal has a handler. */
PyThreadState *PyEval_SaveThread(void) { return NULL; }
void PyEval_RestoreThread(PyThreadState *thread) { (void)thread; }
int PyErr_CheckSignals(void) { return 0; }

enum { SLOT_BYTES = 4096, ONE_SHOT_BYTES = 512, REPETITIONS = 50, LARGEST = 5000 };

static void store(char *data, size_t index, size_t code, int value)
{
    if (code == 0) ((float *)data)[index] = store_f32((float)value);
    if (code == 1) ((double *)data)[index] = store_f64((double)value);
    if (code == 2) ((uint16_t *)data)[index] = store_bf16((float)value);
    if (code == 3) ((uint16_t *)data)[index] = store_f16((float)value);
}

static double load(const char *data, size_t index, size_t code)
{
    if (code == 0) return load_f32(((const float *)data)[index]);
    if (code == 1) return load_f64(((const double *)data)[index]);
    return code == 2 ? load_bf16(((const uint16_t *)data)[index]) : load_f16(((const uint16_t *)data)[index]);
}

static int value_of(int rank, size_t index) { return (int)(index * 7 % 11) * (rank + 1) - 9; }

static void expect(int condition, const char *what, int rank, size_t index)
{
    if (condition) return;
    printf("%s: rank %d is wrong at %zu\n", what, rank, index);
    exit(1);
}

static void check_sums(Kernel *k, size_t count, size_t code)
{
    static char data[LARGEST * 8];
    for (size_t i = 0; i < count; i++) store(data, i, code, value_of(k->rank, i));
    expect(all_reduce(k, data, count, code) == DONE, "all_reduce ends", k->rank, count);
    for (size_t i = 0; i < count; i++) {
        int wanted = 0;
        for (int r = 0; r < k->world_size; r++) wanted += value_of(r, i);
        expect(load(data, i, code) == wanted, "all_reduce", k->rank, i);
    }
}

static void check_gathers(Kernel *k, size_t count)
{
    static char own[LARGEST], all[LARGEST * 4];
    size_t rows[4], before = 0;
    for (int r = 0; r < k->world_size; r++) rows[r] = count + (size_t)r;
    memset(own, 'a' + k->rank, sizeof own);
    for (int r = 0; r < k->world_size; r++) before += rows[r];
    expect(all_gather(k, own, all, 1, before, rows) == DONE, "all_gather ends", k->rank, count);
    for (size_t i = 0, r = 0, end = rows[0]; i < before; i++) {
        if (i == end) end += rows[++r];
        expect(all[i] == 'a' + (int)r, "all_gather", k->rank, i);
    }
}

static void run_rank(Header *header, int first, int rank)
{
    static const size_t counts[] = {0, 1, 31, 33, 400, LARGEST};
    Kernel k = {.header = header, .rank = rank, .first = first, .world_size = (int)header->world_size,
                .slot_bytes = SLOT_BYTES, .one_shot_bytes = ONE_SHOT_BYTES, .spins = 50, .timeout_ns = UINT64_C(120000000000)};
    for (int repetition = 0; repetition < REPETITIONS; repetition++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            for (size_t code = 0; code < SUM_KIND_COUNT; code++) check_sums(&k, counts[c], code);
            if (counts[c] + 4 < LARGEST) check_gathers(&k, counts[c]);
        }
}

int main(void)
{
    for (size_t world_size = 2; world_size <= 4; world_size++) {
        const Header sizes = {.world_size = world_size};
        size_t bytes = slots_offset(&sizes) + 2 * places(&sizes) * SLOT_BYTES;
        Header *header = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (header == MAP_FAILED) return perror("mmap"), 1;
        header->world_size = world_size;
        for (size_t rank = 0; rank < world_size; rank++)
            if (fork() == 0) {
                run_rank(header, 0, (int)rank);
                run_rank(header, (int)world_size, (int)rank);
                _exit(0);
            }
        for (size_t rank = 0; rank < world_size; rank++) {
            int status = 0;
            if (wait(&status) < 0 || status != 0) return printf("%zu ranks: one failed\n", world_size), 1;
        }
        printf("%zu ranks: equal\n", world_size);
        munmap(header, bytes);
    }
    return 0;
}
