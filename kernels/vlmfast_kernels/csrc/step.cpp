// The C interface of the compiled products and decoder layers (see cpu/library.py for the other side).

#include "decoder.h"
#include "pack.h"

using namespace vlmfast;

static Runtime runtime{};

extern "C" {

// Changes whenever a structure or function below does.
int vlmfast_abi() { return 3; }

// Whether this processor and its system have what the products need.
__attribute__((target("arch=x86-64"))) int vlmfast_supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// Whether bf16 products and attention go by AMX tiles; their rounding differs from that of vectors.
int vlmfast_tiles() { return have_tiles(); }

void vlmfast_set_runtime(void* parallel, void* num_threads) {
    runtime.parallel = reinterpret_cast<decltype(runtime.parallel)>(parallel);
    runtime.num_threads = reinterpret_cast<decltype(runtime.num_threads)>(num_threads);
}

int64_t vlmfast_packed_bytes(int64_t inputs, int64_t outputs, int32_t format) {
    return packed_bytes(inputs, outputs, format);
}

// weight [outputs, inputs] bf16 to codes and scale, as ops/quant.py has them for int8 and int4.
void vlmfast_quantize(const void* weight, int64_t inputs, int64_t outputs, int32_t format, void* codes, void* scale,
                      int num_threads) {
    const bf16* const from = static_cast<const bf16*>(weight);
    run_team(runtime, num_threads, [&](Team& team) {
        team.run(outputs, [&](int64_t begin, int64_t end) {
            if (format == kInt4) {
                quantize_int4(from, inputs, static_cast<uint8_t*>(codes), static_cast<bf16*>(scale), begin, end);
            } else {
                quantize_int8(from, inputs, static_cast<int8_t*>(codes), static_cast<float*>(scale), begin, end);
            }
        });
    });
}

// The weight [outputs, inputs] to packed: bf16 itself, or codes (and for int4 the scales, which move in with them).
void vlmfast_pack(const void* weight, const void* scale, int64_t inputs, int64_t outputs, int32_t format, void* packed,
                  int num_threads) {
    run_team(runtime, num_threads, [&](Team& team) {
        team.run(num_blocks(outputs), [&](int64_t begin, int64_t end) {
            if (format == kInt4) {
                pack_int4(static_cast<const uint8_t*>(weight), static_cast<const bf16*>(scale), inputs, outputs,
                          static_cast<Int4Record*>(packed), begin, end);
            } else if (format == kInt8) {
                pack_int8(static_cast<const int8_t*>(weight), inputs, outputs, static_cast<uint8_t*>(packed), begin,
                          end);
            } else {
                pack_bf16(static_cast<const bf16*>(weight), inputs, outputs, static_cast<bf16*>(packed), begin, end);
            }
        });
    });
}

int64_t vlmfast_linear_bytes(int64_t rows, int64_t inputs) { return Activations::bytes_for(rows, inputs); }

// out [rows, outputs] float32 = x W^T + bias, x [rows, inputs] bf16. memory: vlmfast_linear_bytes.
void vlmfast_linear(const Linear* linear, const void* x, int64_t rows, float* out, void* memory, int num_threads) {
    const bf16* const from = static_cast<const bf16*>(x);
    Activations inputs(memory, rows, linear->inputs);
    run_team(runtime, num_threads, [&](Team& team) {
        team.run(rows, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                put_row(inputs, linear->format, row, linear->inputs, [&](int64_t i, __mmask16 lanes) {
                    return widen(_mm256_maskz_loadu_epi16(lanes, from + row * linear->inputs + i));
                });
            }
        });
        apply(*linear, inputs, rows, out, linear->outputs, false, team);
    });
}

// Bytes that vlmfast_layers and vlmfast_logits need for so many rows, the longest of which sees `longest` keys.
int64_t vlmfast_workspace_bytes(const Decoder* decoder, int64_t rows, int64_t longest, int num_threads) {
    rows = std::min(rows, kTile);
    return Workspace(*decoder, rows, num_slots(*decoder, rows, longest, num_threads), nullptr).bytes;
}

// Takes the hidden states through layers first .. last - 1 and adds keys and values to the pages.
void vlmfast_layers(const Decoder* decoder, const Batch* batch, int64_t first, int64_t last, int64_t longest,
                    void* memory, int num_threads) {
    run_team(runtime, num_threads, [&](Team& team) {
        run_layers(*decoder, *batch, first, last, longest, static_cast<char*>(memory), num_threads, team);
    });
}

// logits [rows, vocabulary] of hidden [rows, hidden]: final norm and head.
void vlmfast_logits(const Decoder* decoder, const float* hidden, int64_t rows, float* logits, void* memory,
                    int num_threads) {
    run_team(runtime, num_threads, [&](Team& team) {
        score(*decoder, hidden, rows, logits, static_cast<char*>(memory), team);
    });
}

// Goes on with the likeliest token, `steps` times: row by row from tokens [rows] to chosen [steps, rows]. Each row is a
// part of its own, and positions and lengths, which `batch` holds for the first step, grow with every one.
//
// table [vocabulary, hidden] bf16: embeddings. num_choices: tokens that count. logits [rows, vocabulary]: room.
void vlmfast_continue(const Decoder* decoder, const Batch* batch, const void* table, const int64_t* tokens,
                      int64_t steps, int64_t num_choices, int64_t longest, int64_t* positions, int32_t* lengths,
                      int64_t* chosen, float* logits, void* memory, int num_threads) {
    const Decoder& d = *decoder;
    char* const workspace = static_cast<char*>(memory);
    run_team(runtime, num_threads, [&](Team& team) {
        for (int64_t step = 0; step < steps; step++) {
            team.run(batch->rows, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row++) {
                    const int64_t token = step ? chosen[(step - 1) * batch->rows + row] : tokens[row];
                    const bf16* const from = static_cast<const bf16*>(table) + token * d.hidden;
                    for (int64_t i = 0; i < d.hidden; i++) batch->hidden[row * d.hidden + i] = widen(from[i]);
                }
            });
            run_layers(d, *batch, 0, d.num_layers, longest, workspace, num_threads, team);
            score(d, batch->hidden, batch->rows, logits, workspace, team);
            team.run(batch->rows, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row++) {
                    const float* const scores = logits + row * d.head.outputs;
                    chosen[step * batch->rows + row] = std::max_element(scores, scores + num_choices) - scores;
                    positions[row]++;
                    for (int64_t layer = 0; layer < d.num_layers; layer++) lengths[row * d.num_layers + layer]++;
                }
            });
        }
    });
}

}  // extern "C"
