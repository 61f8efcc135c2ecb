// Runs a generated kernel of paged decode, every thread of every block in turn, on requests of many
// lengths. Global memory is allocated to the byte. Arguments: splits, longest request, seeds.
#include "cuda_on_host.h"
#include KERNEL
#include <random>
#include <vector>

constexpr int batch = 7, num_kv_heads = 2, group = 4, head_dim = 128;
constexpr int num_heads = num_kv_heads * group, block_n = BLOCK_N, page_size = PAGE_SIZE;

template <class T> T *allocated(size_t count) {
  return static_cast<T *>(calloc(std::max<size_t>(count, 1), sizeof(T)));
}

static void run(int num_splits, int longest, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int> lengths(batch);
  for (int &length : lengths) length = random() % (random() % 2 ? longest + 1 : 2 * block_n + 2);
  lengths[seed % batch] = 0;
  lengths[(seed + 1) % batch] = longest;
  int *indptr = allocated<int>(batch + 1), *last = allocated<int>(batch), total = 0;
  for (int b = 0; b < batch; ++b) {
    int pages = (lengths[b] + page_size - 1) / page_size;
    indptr[b + 1] = total += pages;
    last[b] = pages ? lengths[b] - (pages - 1) * page_size : 0;
  }
  int *indices = static_cast<int *>(malloc(total * sizeof(int)));
  for (int i = 0; i < total; ++i) indices[i] = i;
  std::shuffle(indices, indices + total, random);
  size_t pool = size_t(total) * page_size * num_kv_heads * head_dim;
  bfloat16_t *k = allocated<bfloat16_t>(pool), *v = allocated<bfloat16_t>(pool);
  bfloat16_t *q = allocated<bfloat16_t>(batch * num_heads * head_dim);
  bfloat16_t *out = allocated<bfloat16_t>(batch * num_heads * head_dim);
  float *partial = allocated<float>(size_t(batch) * num_splits * num_heads * head_dim);
  float *partial_lse = allocated<float>(batch * num_splits * num_heads);
  // Strides are passed in units of eight elements.
  const int64_t head = head_dim / 8, kv_token = num_kv_heads * head, q_token = num_heads * head;
  const int64_t kv_page = page_size * kv_token;
  CUtensorMap map{{head_dim, page_size, num_kv_heads, total}};
  posix_memalign(reinterpret_cast<void **>(&shared_memory), 1024, SHARED_BYTES);
  for (int z = 0; z < GRID_Z; ++z)
    for (int y = 0; y < GRID_Y; ++y)
      for (int x = 0; x < GRID_X; ++x)
        for (int t = 0; t < NUM_THREADS; ++t) {
          blockIdx = {x, y, z};
          threadIdx = {t, 0, 0};
          LAUNCH;
        }
  for (void *memory : {(void *)indptr, (void *)last, (void *)indices, (void *)k, (void *)v, (void *)q,
                       (void *)out, (void *)partial, (void *)partial_lse, (void *)shared_memory})
    free(memory);
}

int main(int, char **arguments) {
  for (int seed = 0; seed < atoi(arguments[3]); ++seed)
    run(atoi(arguments[1]), atoi(arguments[2]), seed);
  printf("%ld\n", num_accesses);
}
