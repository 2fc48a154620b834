// The part of torch's stable C interface that the ops use (torch/csrc/inductor/aoti_torch/c/shim.h and
// torch/csrc/stable/c/shim.h). These functions stay as they are, so a library that calls nothing else serves any torch
// from 2.11 on and any Python. Declared here, since torch's headers take longer to compile than an op;
// tests/ops/cpu/test_torch_c.py holds the two against each other.

#pragma once

#include <cstddef>
#include <cstdint>

struct AtenTensorOpaque;
class TorchLibraryOpaque;
struct StringOpaque;
struct StableListOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StringHandle = StringOpaque*;
using StableListHandle = StableListOpaque*;
using StableIValue = uint64_t;
using AOTITorchError = int32_t;  // 0: no error

extern "C" {
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_layout_strided();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int16();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** ret_data_ptr);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* ret_dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** ret_sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** ret_strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* ret_dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* ret_device_type);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* ret_is_contiguous);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes_ptr, const int64_t* strides_ptr,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* ret_new_tensor);
AOTITorchError torch_from_blob(void* data, int64_t ndim, const int64_t* sizes_ptr, const int64_t* strides_ptr,
                               int64_t storage_offset, int32_t dtype, int32_t device_type, int32_t device_index,
                               AtenTensorHandle* ret, int32_t layout, const uint8_t* opaque_metadata,
                               int64_t opaque_metadata_size, void (*deleter)(void* data, void* ctx), void* deleter_ctx);
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t ndim, const int64_t* sizes_ptr,
                                              const int64_t* strides_ptr, int64_t storage_offset,
                                              AtenTensorHandle* ret_new_tensor);
AOTITorchError aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle src, int32_t non_blocking);

AOTITorchError torch_string_length(StringHandle handle, size_t* length);
AOTITorchError torch_string_c_str(StringHandle handle, const char** data);
AOTITorchError torch_delete_string(StringHandle handle);

AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* ret);
AOTITorchError torch_list_size(StableListHandle list_handle, size_t* size);
AOTITorchError torch_list_get_item(StableListHandle list_handle, size_t index, StableIValue* element);
AOTITorchError torch_list_push_back(StableListHandle list_handle, StableIValue element);
AOTITorchError torch_delete_list(StableListHandle list_handle);

AOTITorchError torch_get_num_threads(uint32_t* out_num_threads);

AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* k, const char* file, uint32_t line,
                                            TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name,
                                  void (*fn)(StableIValue*, uint64_t, uint64_t), uint64_t extension_build_version);
}
