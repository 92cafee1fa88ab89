// GraphBolt's newest disk feature as operators of torch: compiled from DGL's sources, which have it, where the
// released DGL does not. Built by tools/graphbolt_env.sh --dgl, loaded by graphbolt_side.py.

#include <torch/script.h>

#include "cnumpy.h"

using graphbolt::Future;
using graphbolt::storage::OnDiskNpyArray;

TORCH_LIBRARY(gids_graphbolt, m) {
  m.class_<Future<torch::Tensor>>("TensorFuture").def("wait", &Future<torch::Tensor>::Wait);
  m.class_<OnDiskNpyArray>("OnDiskNpyArray").def("index_select", &OnDiskNpyArray::IndexSelect);
  m.def("ondisk_npy_array", &OnDiskNpyArray::Create);
}
