/* Compares the kernels of a step with plain loops in double, without Python. `run.sh` runs this program for any processor. */

#include <stdio.h>
#include <stdlib.h>

#include "../../../parallelformers_ng/kernels/_layer.h"

static double worst;

/* Ends the program if two numbers differ by more than `tolerance` times the largest number of their array. */
static void compare(const char *what, double found, double wanted, double largest, double tolerance)
{
    double distance = fabs(found - wanted) / largest;
    if (distance > worst) worst = distance;
    if (distance <= tolerance) return;
    printf("%s: %.9g instead of %.9g, the largest being %.9g\n", what, found, wanted, largest);
    exit(1);
}

/* Returns a random number between -1 and 1. The sequence is the same on every machine (xorshift, Marsaglia 2003). */
static float next_random(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* Computes attention of one query head: y = Σ softmax(scale · q k + mask) v. `seen` and `added` may be NULL. */
static void plain_attention(const double *q, const double *k, const double *v, const uint8_t *seen, const double *added,
                            size_t tokens, size_t width, double scale, double *y)
{
    double scores[256], total = 0;
    for (size_t t = 0; t < tokens; t++) {
        double s = added ? added[t] : 0;
        for (size_t i = 0; i < width; i++) s += scale * q[i] * k[t * width + i];
        scores[t] = seen && !seen[t] ? 0 : exp(s);
        total += scores[t];
    }
    for (size_t i = 0; i < width; i++) y[i] = 0;
    for (size_t t = 0; t < tokens; t++)
        for (size_t i = 0; i < width; i++) y[i] += scores[t] / total * v[t * width + i];
}

static void plain_linear(const double *x, const double *w, const double *bias, double *y, size_t rows, size_t in,
                         size_t out)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t o = 0; o < out; o++) {
            y[r * out + o] = bias ? bias[o] : 0;
            for (size_t i = 0; i < in; i++) y[r * out + o] += x[r * in + i] * w[o * in + i];
        }
}

static void plain_norm(const double *x, const double *w, double *y, size_t rows, size_t width, double epsilon)
{
    for (size_t r = 0; r < rows; r++, x += width, y += width) {
        double squares = 0;
        for (size_t i = 0; i < width; i++) squares += x[i] * x[i];
        for (size_t i = 0; i < width; i++) y[i] = w[i] * x[i] / sqrt(squares / (double)width + epsilon);
    }
}

/* Each array exists twice: in the type that the kernel reads, and with the same numbers in double. */
#define DEFINE_CHECKS(NAME, TYPE, KIND, TOLERANCE)                                                                  \
    typedef struct { TYPE *given; double *wide; } Array_##NAME;                                                     \
    static Array_##NAME random_##NAME(size_t count)                                                                 \
    {                                                                                                               \
        Array_##NAME made = {calloc(count, sizeof(TYPE)), calloc(count, sizeof(double))};                           \
        for (size_t i = 0; i < count; i++) {                                                                        \
            made.given[i] = store_##NAME(next_random());                                                            \
            made.wide[i] = load_##NAME(made.given[i]);                                                              \
        }                                                                                                           \
        return made;                                                                                                \
    }                                                                                                               \
    static void check_##NAME(const char *what, const TYPE *found, const double *wanted, size_t count, double times) \
    {                                                                                                               \
        double largest = 1e-3;                                                                                      \
        for (size_t i = 0; i < count; i++) largest = fmax(largest, fabs(wanted[i]));                                \
        for (size_t i = 0; i < count; i++)                                                                          \
            compare(what, load_##NAME(found[i]), wanted[i], largest, times * TOLERANCE);                            \
    }                                                                                                               \
    static void linears_##NAME(void)                                                                                \
    {                                                                                                               \
        static const size_t widths[] = {1, 15, 16, 33, 64, 129, 2100}, many[] = {1, 2, 3, 4, 5, 6, 7, 17};          \
        for (size_t w = 0; w < 7; w++)                                                                              \
            for (size_t m = 0; m < 8; m++)                                                                          \
                for (size_t out = 1; out < 10; out += 4) {                                                          \
                    size_t in = widths[w], rows = many[m];                                                          \
                    Array_##NAME x = random_##NAME(rows * in), weight = random_##NAME(out * in + 1);                \
                    Array_##NAME bias = random_##NAME(out), y = random_##NAME(rows * out);                          \
                    Linear is = {                                                                                   \
                        .x = x.given, .matrix = {.w = weight.given, .bias = bias.given, .stride = in},              \
                        .y = y.given, .rows = rows, .in = in, .out = out, .kind = KIND,                             \
                    };                                                                                              \
                    linear(&is, NULL, malloc(linear_work_bytes(&is)));                                              \
                    plain_linear(x.wide, weight.wide, bias.wide, y.wide, rows, in, out);                            \
                    check_##NAME("linear " #NAME, y.given, y.wide, rows * out, 1);                                  \
                    Input input = {.x = x.given, .rows = rows, .in = in, .work = malloc(input_work_bytes(rows, in))}; \
                    vectors_##NAME(widened_##NAME(&input), weight.given, bias.given, y.given, rows, in, in, out, out); \
                    check_##NAME("vectors " #NAME, y.given, y.wide, rows * out, 1);                                 \
                }                                                                                                   \
    }                                                                                                               \
    /* Checks integers of 8 bits, or of 4 bits in groups: products in integers if possible, and widened to fp32. */ \
    static void integers_of_##NAME(size_t rows, size_t in, size_t out, size_t group)                                \
    {                                                                                                               \
        const size_t bytes = group ? in / 2 : in, groups = group ? in / group : 1;                                  \
        int8_t *q = calloc(out * bytes + 1, 1);                                                                     \
        double *weight = calloc(out * in, sizeof(double));                                                          \
        float *scales = calloc(out * groups, sizeof(float)), *wide = calloc(rows * in, sizeof(float));              \
        Array_##NAME own = random_##NAME(out * groups), bias = random_##NAME(out), x = random_##NAME(rows * in);    \
        Array_##NAME y = random_##NAME(rows * out);                                                                 \
        for (size_t i = 0; i < out * groups; i++) scales[i] = (float)own.wide[i];                                   \
        for (size_t i = 0; i < out * bytes; i++) q[i] = (int8_t)(next_random() * 128);                              \
        for (size_t i = 0; i < out * in; i++) {                                                                     \
            int number = group ? (int8_t)((uint8_t)q[i / 2] << (i % 2 ? 0 : 4)) >> 4 : q[i];                        \
            weight[i] = number * own.wide[i / (in / groups)];                                                       \
        }                                                                                                           \
        for (size_t i = 0; i < rows * in; i++) wide[i] = load_##NAME(x.given[i]);                                   \
        const void *given = group ? (const void *)own.given : scales;                                               \
        const Matrix m = {.w = q, .scale = given, .bias = bias.given, .stride = bytes, .group = group};             \
        plain_linear(x.wide, weight, bias.wide, y.wide, rows, in, out);                                             \
        Linear is = {                                                                                               \
            .x = x.given, .matrix = m, .y = y.given, .rows = rows, .in = in, .out = out, .kind = KIND,              \
        };                                                                                                          \
        linear(&is, NULL, malloc(linear_work_bytes(&is)));                                                          \
        check_##NAME("integers " #NAME, y.given, y.wide, rows * out, 1);                                            \
        float *products = calloc(rows * out, sizeof(float)), *laid = malloc(met_bytes(rows, in));                   \
        lay_out_rows(wide, &m, laid, rows, in);                                                                     \
        widened(laid, &m, products, rows, in, out, KIND, 0, out);                                                   \
        for (size_t i = 0; i < rows * out; i++) y.given[i] = store_##NAME(products[i] + (float)bias.wide[i % out]); \
        check_##NAME("widened " #NAME, y.given, y.wide, rows * out, 1);                                             \
    }                                                                                                               \
    static void all_integers_##NAME(void)                                                                           \
    {                                                                                                               \
        static const size_t widths[] = {1, 15, 33, 64, 129, 2100}, groups[] = {32, 64, 128, 384}, many[] = {1, 3, 7, 18}; \
        for (size_t m = 0; m < 4; m++)                                                                              \
            for (size_t out = 1; out < 19; out += 8) {                                                              \
                for (size_t w = 0; w < 6; w++) integers_of_##NAME(many[m], widths[w], out, 0);                      \
                for (size_t g = 0; g < 4; g++)                                                                      \
                    for (size_t count = 1; count < 12; count += 5)                                                  \
                        integers_of_##NAME(many[m], count * groups[g], out, groups[g]);                             \
            }                                                                                                       \
    }                                                                                                               \
    static void norms_##NAME(void)                                                                                  \
    {                                                                                                               \
        for (size_t width = 1; width < 200; width += 33) {                                                          \
            Array_##NAME x = random_##NAME(3 * width), w = random_##NAME(width), y = random_##NAME(3 * width);      \
            rms_norm_##NAME(x.given, w.given, y.given, 3, width, 1e-5f);                                            \
            plain_norm(x.wide, w.wide, y.wide, 3, width, 1e-5);                                                     \
            check_##NAME("norm " #NAME, y.given, y.wide, 3 * width, 1);                                             \
        }                                                                                                           \
    }                                                                                                               \
    static void attentions_##NAME(size_t heads, size_t kv_heads, size_t mask_kind)                                  \
    {                                                                                                               \
        enum { BATCH = 2, TOKENS_ = 37, WIDTH = 36 };                                                               \
        Array_##NAME q = random_##NAME(BATCH * heads * WIDTH), added = random_##NAME(TOKENS_);                      \
        Array_##NAME k = random_##NAME(BATCH * kv_heads * TOKENS_ * WIDTH), y = random_##NAME(BATCH * heads * WIDTH); \
        Array_##NAME v = random_##NAME(BATCH * kv_heads * TOKENS_ * WIDTH);                                         \
        uint8_t seen[TOKENS_];                                                                                      \
        for (size_t t = 0; t < TOKENS_; t++) seen[t] = t % 3 != 1;                                                  \
        const void *mask = mask_kind == BOOL_MASK ? (const void *)seen : added.given;                               \
        Attention is = {                                                                                            \
            .q = q.given, .mask = {.at = mask, .kind = mask_kind}, .y = y.given, .rows = BATCH, .heads = heads,     \
            .cached = {                                                                                             \
                .keys = k.given, .values = v.given, .k_batch = kv_heads * TOKENS_ * WIDTH,                          \
                .k_head = TOKENS_ * WIDTH, .k_token = WIDTH, .v_batch = kv_heads * TOKENS_ * WIDTH,                 \
                .v_head = TOKENS_ * WIDTH, .v_token = WIDTH,                                                        \
            },                                                                                                      \
            .span_count = BATCH, .kv_heads = kv_heads, .tokens = TOKENS_, .width = WIDTH, .value_width = WIDTH,     \
            .q_row = heads * WIDTH, .q_head = WIDTH, .kind = KIND,                                                  \
        };                                                                                                          \
        attention_##NAME(&is, (float[]){0.3f}, malloc(attention_work_bytes(&is)));                                  \
        for (size_t head = 0; head < BATCH * heads; head++) {                                                       \
            size_t from = (head / heads * kv_heads + head % heads / (heads / kv_heads)) * TOKENS_ * WIDTH;          \
            plain_attention(q.wide + head * WIDTH, k.wide + from, v.wide + from,                                    \
                            mask_kind == BOOL_MASK ? seen : NULL, mask_kind == ADDED_MASK ? added.wide : NULL,      \
                            TOKENS_, WIDTH, 0.3f, y.wide + head * WIDTH);                                           \
        }                                                                                                           \
        check_##NAME("attention " #NAME, y.given, y.wide, BATCH * heads * WIDTH, 1);                                \
    }                                                                                                               \
    /* Checks spans: the last `count` tokens of two sequences; the second begins later. A padding row follows. */   \
    static void spans_##NAME(size_t heads, size_t kv_heads, size_t count)                                           \
    {                                                                                                               \
        enum { BATCH = 2, TOKENS_ = 37, WIDTH = 36 };                                                               \
        const size_t rows = BATCH * count + 1, shared = heads / kv_heads;                                           \
        Array_##NAME q = random_##NAME(rows * heads * WIDTH), k = random_##NAME(BATCH * kv_heads * TOKENS_ * WIDTH); \
        Array_##NAME v = random_##NAME(BATCH * kv_heads * TOKENS_ * WIDTH), y = random_##NAME(rows * heads * WIDTH); \
        const Span spans[BATCH] = {{0, 0, TOKENS_, 0, count}, {1, 5, TOKENS_, count, count}};                       \
        const Attention is = {                                                                                      \
            .q = q.given, .y = y.given, .spans = spans, .span_count = BATCH, .rows = rows, .heads = heads,          \
            .cached = {                                                                                             \
                .keys = k.given, .values = v.given, .k_batch = kv_heads * TOKENS_ * WIDTH,                          \
                .k_head = TOKENS_ * WIDTH, .k_token = WIDTH, .v_batch = kv_heads * TOKENS_ * WIDTH,                 \
                .v_head = TOKENS_ * WIDTH, .v_token = WIDTH,                                                        \
            },                                                                                                      \
            .kv_heads = kv_heads, .tokens = TOKENS_, .width = WIDTH, .value_width = WIDTH,                          \
            .q_row = heads * WIDTH, .q_head = WIDTH, .kind = KIND,                                                  \
        };                                                                                                          \
        attention_##NAME(&is, (float[]){0.3f}, malloc(attention_work_bytes(&is)));                                  \
        for (size_t row = 0; row < rows; row++)                                                                     \
            for (size_t head = 0; head < heads; head++) {                                                           \
                double *to = y.wide + (row * heads + head) * WIDTH;                                                 \
                const Span *span = &spans[row / count % BATCH];                                                     \
                const size_t from = ((span->batch * kv_heads + head / shared) * TOKENS_ + span->first) * WIDTH;     \
                const size_t seen = TOKENS_ - count + row % count + 1 - span->first;                                \
                plain_attention(q.wide + (row * heads + head) * WIDTH, k.wide + from, v.wide + from, NULL, NULL,    \
                                seen, WIDTH, 0.3, to);                                                              \
                for (size_t i = 0; row == rows - 1 && i < WIDTH; i++) to[i] = 0;                                    \
            }                                                                                                       \
        check_##NAME("spans " #NAME, y.given, y.wide, rows * heads * WIDTH, 1);                                     \
    }                                                                                                               \
    static void halves_##NAME(size_t n)                                                                                \
    {                                                                                                               \
        enum { BATCH = 2, HIDDEN = 40, Q = 4, KV = 2, WIDTH = 12, TOKENS_ = 9, INNER = 52 };                        \
        const size_t ROWS_ = BATCH * n;                                                                             \
        enum { KEPT = KV * TOKENS_ * WIDTH };                                                                       \
        Array_##NAME x = random_##NAME(ROWS_ * HIDDEN), norm = random_##NAME(HIDDEN);                               \
        Array_##NAME y = random_##NAME(ROWS_ * HIDDEN);                                                             \
        Array_##NAME wq = random_##NAME(Q * WIDTH * HIDDEN), wk = random_##NAME(KV * WIDTH * HIDDEN);               \
        Array_##NAME wv = random_##NAME(KV * WIDTH * HIDDEN), wo = random_##NAME(HIDDEN * Q * WIDTH);               \
        Array_##NAME cosines = random_##NAME(n * WIDTH), sines = random_##NAME(n * WIDTH);                          \
        Array_##NAME keys = random_##NAME(BATCH * KEPT), values = random_##NAME(BATCH * KEPT);                      \
        Span spans[BATCH] = {{0, 0, TOKENS_, 0, n}, {1, 0, TOKENS_, n, n}};                                         \
        AttentionHalf half = {                                                                                      \
            .weights = {                                                                                            \
                .q = {.w = wq.given, .stride = HIDDEN}, .k = {.w = wk.given, .stride = HIDDEN},                     \
                .v = {.w = wv.given, .stride = HIDDEN}, .o = {.w = wo.given, .stride = Q * WIDTH},                  \
                .norm = norm.given,                                                                                 \
                .hidden = HIDDEN, .heads = Q, .kv_heads = KV, .width = WIDTH,                                       \
            },                                                                                                      \
            .cached = {                                                                                             \
                .keys = keys.given, .values = values.given, .k_batch = KEPT, .k_head = TOKENS_ * WIDTH,             \
                .k_token = WIDTH, .v_batch = KEPT, .v_head = TOKENS_ * WIDTH, .v_token = WIDTH,                     \
            },                                                                                                      \
            .x = x.given, .y = y.given,                                                                             \
            .step = {                                                                                               \
                .cos = cosines.given, .sin = sines.given, .cos_row = WIDTH, .sin_row = WIDTH, .queries = n,         \
                .spans = n > 1 ? spans : NULL, .span_count = BATCH, .rows = ROWS_, .tokens = TOKENS_, .kind = KIND, \
            },                                                                                                      \
        };                                                                                                          \
        attention_half(&half, (float[]){1e-5f, 0, 0, 0.25f}, malloc(attention_half_work_bytes(&half)));             \
        double normed[ROWS_ * HIDDEN], q[ROWS_ * Q * WIDTH], k[ROWS_ * KV * WIDTH], v[ROWS_ * KV * WIDTH];               \
        double seen[ROWS_ * Q * WIDTH];                                                                             \
        plain_norm(x.wide, norm.wide, normed, ROWS_, HIDDEN, 1e-5);                                                      \
        plain_linear(normed, wq.wide, NULL, q, ROWS_, HIDDEN, Q * WIDTH);                                                \
        plain_linear(normed, wk.wide, NULL, k, ROWS_, HIDDEN, KV * WIDTH);                                               \
        plain_linear(normed, wv.wide, NULL, v, ROWS_, HIDDEN, KV * WIDTH);                                               \
        for (size_t r = 0; r < ROWS_; r++) {                                                                        \
            const size_t i = r % n;                                                                                 \
            turn(q + r * Q * WIDTH, cosines.wide + i * WIDTH, sines.wide + i * WIDTH, Q, WIDTH);                    \
            turn(k + r * KV * WIDTH, cosines.wide + i * WIDTH, sines.wide + i * WIDTH, KV, WIDTH);                  \
            for (size_t head = 0; head < KV; head++) {                                                              \
                const size_t to = ((r / n * KV + head) * TOKENS_ + TOKENS_ - n + i) * WIDTH;                        \
                memcpy(keys.wide + to, k + (r * KV + head) * WIDTH, WIDTH * sizeof(double));                        \
                memcpy(values.wide + to, v + (r * KV + head) * WIDTH, WIDTH * sizeof(double));                      \
            }                                                                                                       \
        }                                                                                                           \
        check_##NAME("keys " #NAME, keys.given, keys.wide, BATCH * KEPT, 4);                                        \
        for (size_t r = 0; r < ROWS_; r++)                                                                          \
            for (size_t head = 0; head < Q; head++) {                                                               \
                const size_t from = (r / n * KV + head / (Q / KV)) * TOKENS_ * WIDTH, at = (r * Q + head) * WIDTH;  \
                plain_attention(q + at, keys.wide + from, values.wide + from, NULL, NULL, TOKENS_ - n + r % n + 1,  \
                                WIDTH, 0.25, seen + at);                                                            \
            }                                                                                                       \
        plain_linear(seen, wo.wide, NULL, y.wide, ROWS_, Q * WIDTH, HIDDEN);                                        \
        check_##NAME("attention half " #NAME, y.given, y.wide, ROWS_ * HIDDEN, 10);                                 \
                                                                                                                    \
        Array_##NAME wg = random_##NAME(INNER * HIDDEN), wu = random_##NAME(INNER * HIDDEN);                        \
        Array_##NAME wd = random_##NAME(HIDDEN * INNER), a = random_##NAME(ROWS_ * HIDDEN);                         \
        Array_##NAME r = random_##NAME(ROWS_ * HIDDEN);                                                             \
        FeedHalf feeding = {                                                                                        \
            .weights = {                                                                                            \
                .gate = {.w = wg.given, .stride = HIDDEN}, .up = {.w = wu.given, .stride = HIDDEN},                 \
                .down = {.w = wd.given, .stride = INNER}, .norm = norm.given, .hidden = HIDDEN, .inner = INNER,     \
            },                                                                                                      \
            .x = x.given, .a = a.given, .r = r.given, .y = y.given, .rows = ROWS_, .kind = KIND,                    \
        };                                                                                                          \
        feed_half(&feeding, (float[]){1e-5f}, malloc(feed_half_work_bytes(&feeding)));                              \
        double g[ROWS_ * INNER], u[ROWS_ * INNER];                                                                  \
        for (size_t i = 0; i < ROWS_ * HIDDEN; i++) r.wide[i] = x.wide[i] + a.wide[i];                              \
        plain_norm(r.wide, norm.wide, normed, ROWS_, HIDDEN, 1e-5);                                                      \
        plain_linear(normed, wg.wide, NULL, g, ROWS_, HIDDEN, INNER);                                                    \
        plain_linear(normed, wu.wide, NULL, u, ROWS_, HIDDEN, INNER);                                                    \
        for (size_t i = 0; i < ROWS_ * INNER; i++) g[i] *= sigmoid(g[i]) * u[i];                                    \
        plain_linear(g, wd.wide, NULL, y.wide, ROWS_, INNER, HIDDEN);                                               \
        check_##NAME("sum " #NAME, r.given, r.wide, ROWS_ * HIDDEN, 1);                                             \
        check_##NAME("feed half " #NAME, y.given, y.wide, ROWS_ * HIDDEN, 10);                                      \
    }                                                                                                               \
    static void all_##NAME(void)                                                                                    \
    {                                                                                                               \
        linears_##NAME(), all_integers_##NAME(), norms_##NAME();                                                    \
        for (size_t n = 1; n < 10; n += 4) halves_##NAME(n);                                                        \
        for (size_t mask_kind = 0; mask_kind < 3; mask_kind++)                                                      \
            for (size_t kv_heads = 1; kv_heads < 4; kv_heads++)                                                     \
                for (size_t shared = 1; shared < 8; shared++)                                                       \
                    attentions_##NAME(shared * kv_heads, kv_heads, mask_kind);                                      \
        for (size_t kv_heads = 1; kv_heads < 4; kv_heads++)                                                         \
            for (size_t shared = 1; shared < 8; shared++)                                                           \
                for (size_t count = 1; count < 33; count += 3) spans_##NAME(shared * kv_heads, kv_heads, count);    \
    }

/* Rotates x by its positions, as `_layer.h` does. */
static void turn(double *x, const double *cosines, const double *sines, size_t heads, size_t width)
{
    for (; heads; heads--, x += width)
        for (size_t i = 0, j = width / 2; j < width; i++, j++) {
            double a = x[i], b = x[j];
            x[i] = a * cosines[i] - b * sines[i];
            x[j] = b * cosines[j] + a * sines[j];
        }
}

DEFINE_CHECKS(f32, float, F32, 2e-5)
DEFINE_CHECKS(bf16, uint16_t, BF16, 6e-3)

int main(void)
{
    all_f32();
    printf("fp32: equal, at most %.1e away\n", worst);
    worst = 0;
    all_bf16();
    printf("bf16: equal, at most %.1e away\n", worst);
    return 0;
}
