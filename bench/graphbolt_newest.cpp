// GraphBolt's newest disk feature and its cache in host memory as operators of torch, under the names that its Python
// gives them: compiled from DGL's sources, which have them, where the released DGL does not. Built by
// tools/graphbolt_env.sh --dgl, loaded by rows_side.py.

#include <torch/script.h>

#include "cnumpy.h"
#include "feature_cache.h"
#include "partitioned_cache_policy.h"

using graphbolt::Future;
using namespace graphbolt::storage;
using Policy = PartitionedCachePolicy;

TORCH_LIBRARY_FRAGMENT(graphbolt, m) {
  m.class_<Future<void>>("VoidFuture").def("wait", &Future<void>::Wait);
  m.class_<Future<torch::Tensor>>("TensorFuture").def("wait", &Future<torch::Tensor>::Wait);
  m.class_<Future<std::vector<torch::Tensor>>>("TensorListFuture")
      .def("wait", &Future<std::vector<torch::Tensor>>::Wait);

  m.class_<OnDiskNpyArray>("OnDiskNpyArray").def("index_select", &OnDiskNpyArray::IndexSelect);
  m.def("ondisk_npy_array", &OnDiskNpyArray::Create);

  m.class_<Policy>("PartitionedCachePolicy")
      .def("query", &Policy::Query)
      .def("query_and_replace", &Policy::QueryAndReplace)
      .def("query_and_replace_async", &Policy::QueryAndReplaceAsync)
      .def("reading_completed", &Policy::ReadingCompleted)
      .def("reading_completed_async", &Policy::ReadingCompletedAsync)
      .def("writing_completed", &Policy::WritingCompleted);
  m.def("s3_fifo_cache_policy", &Policy::Create<S3FifoCachePolicy>);
  m.def("sieve_cache_policy", &Policy::Create<SieveCachePolicy>);
  m.def("lru_cache_policy", &Policy::Create<LruCachePolicy>);
  m.def("clock_cache_policy", &Policy::Create<ClockCachePolicy>);
  m.class_<FeatureCache>("FeatureCache")
      .def("query", &FeatureCache::Query)
      .def("query_async", &FeatureCache::QueryAsync)
      .def("replace", &FeatureCache::Replace);
  m.def("feature_cache", &FeatureCache::Create);
}
