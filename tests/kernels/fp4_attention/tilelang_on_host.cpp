// Runs a generated attention kernel on inputs from a file and writes what it computes to another.
// Both hold raw arrays, in the order in which they are read and written here. Arguments: the files,
// and whether the last thread of a block takes its turn first (0 or 1).
#include "hopper_on_host.h"
#include KERNEL

static FILE *input;
template <class T> std::vector<T> array(size_t size) {
  std::vector<T> values(size);
  if (fread(values.data(), sizeof(T), size, input) != size) exit(2);
  return values;
}
static CUtensorMap map_of(const void *data, int bytes, int a, int b, int c, int d, int box_b) {
  int columns = min(a, 128 / bytes);
  return {static_cast<const char *>(data), bytes, {a, b, c, d}, {columns, box_b}};
}

static int batch, num_heads, num_kv_heads, query_len, kv_len, padded_keys, num_means;
static int64_t out_stride_b, out_stride_h, out_stride_s;
static float logit_scale, *QScale, *KScale, *VScale, *Delta, *Lse;
static bfloat16_t *Q;
static OUT_TYPE *Out;
static CUtensorMap Q_desc, K_desc, V_desc;
static void body() { LAUNCH; }

int main(int, char **arguments) {
  input = fopen(arguments[1], "rb");
  is_reversed = atoi(arguments[3]);
  std::vector<int> sizes = array<int>(7);
  batch = sizes[0], num_heads = sizes[1], num_kv_heads = sizes[2], query_len = sizes[3];
  kv_len = sizes[4], padded_keys = sizes[5], num_means = sizes[6];
  std::vector<float> factors = array<float>(3), v_scale = array<float>(batch * num_kv_heads);
  logit_scale = factors[0], QScale = &factors[1], KScale = &factors[2], VScale = v_scale.data();
  size_t heads = batch * num_heads, kv_heads = batch * num_kv_heads;
  std::vector<float> delta = array<float>(HAS_MEANS ? heads * num_means * kv_len : 0);
  std::vector<bfloat16_t> q = array<bfloat16_t>(heads * query_len * HEAD_DIM);
  std::vector<bfloat16_t> k = array<bfloat16_t>(kv_heads * padded_keys * HEAD_DIM);
  std::vector<char> v = array<char>(kv_heads * padded_keys * HEAD_DIM * V_BYTES);
  std::vector<OUT_TYPE> out(heads * query_len * HEAD_DIM);
  std::vector<float> lse(heads * query_len, NAN);
  Delta = delta.data(), Lse = lse.data(), Q = q.data(), Out = out.data();
  memset(Out, 0xFF, out.size() * sizeof(OUT_TYPE));
  // In units of eight elements.
  out_stride_s = HEAD_DIM / 8, out_stride_h = query_len * out_stride_s;
  out_stride_b = num_heads * out_stride_h;
  Q_desc = map_of(Q, 2, HEAD_DIM, query_len, num_heads, batch, BLOCK_M);
  K_desc = map_of(k.data(), 2, HEAD_DIM, padded_keys, num_kv_heads, batch, BLOCK_N);
  V_desc = map_of(v.data(), V_BYTES, padded_keys, HEAD_DIM, num_kv_heads, batch, HEAD_DIM);
  V_desc.box[0] = min(BLOCK_N, 128 / V_BYTES);
  num_threads = NUM_THREADS;
  void *memory;
  if (posix_memalign(&memory, 1024, SHARED_BYTES)) exit(2);
  shared_memory = static_cast<unsigned char *>(memory);
  for (int z = 0; z < batch; ++z)
    for (int y = 0; y < num_heads; ++y)
      for (int x = 0; x < (query_len + BLOCK_M - 1) / BLOCK_M; ++x) run_block({x, y, z}, body);
  FILE *output = fopen(arguments[2], "wb");
  fwrite(Out, sizeof(OUT_TYPE), out.size(), output);
  fwrite(Lse, sizeof(float), lse.size(), output);
  fclose(output);
}
