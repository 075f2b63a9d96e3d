// A device as vendors make them: C++ on torch's private-use key, its memory on the host.
//
// A few kernels of its own; everything else goes through the boxed `at::native::cpu_fallback`, as in torch_npu, torch_musa
// and MPS. It keeps its own list of what fell back, read through ctypes, of which torch and shadowrun know nothing.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_and_resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_cpu.h>
#include <ATen/ops/add.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/erfinv.h>
#include <ATen/ops/expm1.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;

c10::Device here() {
  return {kDevice, 0};
}

// -- what fell back ------------------------------------------------------------------------------

enum Manner { silent = 0, warned_each = 1, warned_once = 2, warned_on_stderr = 3 };

std::mutex guard; // backward runs on a thread of its own
std::string fallen; // kernels, one per line
std::string answer;
std::set<std::string> told;
int manner = silent;

void note(const std::string& name) {
  std::lock_guard<std::mutex> lock(guard);
  fallen += name + "\n";
}

std::string name_of(const c10::OperatorHandle& op) {
  std::string name = op.schema().operator_name().name;
  const auto& overload = op.schema().operator_name().overload_name;
  return overload.empty() ? name : name + "." + overload;
}

// Torch_npu's way: past the handler that would make it a Python warning.
void warn_on_stderr(const std::string& text) {
  c10::WarningHandler().process(c10::Warning(c10::UserWarning(), {__func__, __FILE__, __LINE__}, text, false));
}

void tell(const std::string& name) {
  const std::string text = "The operator '" + name +
      "' is not currently supported on the CPPDEV backend and will fall back to run on the CPU. "
      "This may have performance implications.";
  if (manner == warned_each) {
    TORCH_WARN(text);
  } else if (manner == warned_once) {
    TORCH_WARN_ONCE(text);
  } else if (manner == warned_on_stderr) {
    std::unique_lock<std::mutex> lock(guard);
    const bool first = told.insert(name).second;
    lock.unlock();
    if (first)
      warn_on_stderr("CAUTION: " + text);
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = name_of(op);
  TORCH_CHECK_NOT_IMPLEMENTED(
      name.rfind("aten::sinh", 0) != 0, "The operator '", name, "' is not currently implemented for the CPPDEV device.");
  note(name);
  tell(name);
  at::native::cpu_fallback(op, stack);
}

// -- memory --------------------------------------------------------------------------------------

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = n ? std::malloc(n) : nullptr;
    return {data, data, &std::free, here()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &std::free;
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    std::memcpy(to, from, n);
  }
};

HostAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

// -- one device, one stream ----------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return here();
  }
  c10::Device getDevice() const override {
    return here();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, here());
  }
  c10::Stream exchangeStream(c10::Stream) const override {
    return c10::Stream(c10::Stream::DEFAULT, here());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
};

const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// -- kernels of its own --------------------------------------------------------------------------

// The same memory as a tensor of the CPU: how this device computes.
at::Tensor as_cpu(const at::Tensor& t) {
  if (t.is_cpu())
    return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()));
}

at::Tensor as_mine(const at::Tensor& computed) {
  at::Tensor out = at::detail::empty_strided_generic(
      computed.sizes(), computed.strides(), &allocator, c10::DispatchKeySet(kKey), computed.scalar_type());
  as_cpu(out).copy_(computed);
  return out;
}

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      &allocator,
      c10::DispatchKeySet(kKey),
      c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  as_cpu(to).copy_(as_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Tensor as_strided(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self,
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::make_optional(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set(
    at::Tensor& self,
    at::Storage storage,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self,
      std::move(storage),
      offset.guard_int(__FILE__, __LINE__),
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride));
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return at::_local_scalar_dense(as_cpu(self));
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  as_cpu(self).fill_(value);
  return self;
}

at::Tensor add(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  return as_mine(at::add(as_cpu(a), as_cpu(b), alpha));
}

at::Tensor mul(const at::Tensor& a, const at::Tensor& b) {
  return as_mine(at::mul(as_cpu(a), as_cpu(b)));
}

at::Tensor& mul_out(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  const auto computed = at::mul(as_cpu(a), as_cpu(b));
  if (out.sizes() != computed.sizes())
    out.resize_(computed.sizes());
  as_cpu(out).copy_(computed);
  return out;
}

at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  return as_mine(at::mm(as_cpu(a), as_cpu(b)));
}

at::Tensor relu(const at::Tensor& a) {
  return as_mine(at::relu(as_cpu(a)));
}

// A kernel that moves its inputs to the CPU by torch's helper, as some vendors' explicit ones do.
at::Tensor erfinv(const at::Tensor& a) {
  note("aten::erfinv");
  return at::erfinv(at::_to_cpu({a})[0]).to(a.device());
}

// One that copies by hand: no witness sees this unless it warns.
at::Tensor expm1(const at::Tensor& a) {
  note("aten::expm1");
  tell("aten::expm1");
  return at::expm1(a.cpu()).to(a.device());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("fill_.Scalar", fill);
  m.impl("add.Tensor", add);
  m.impl("mul.Tensor", mul);
  m.impl("mul.out", mul_out);
  m.impl("mm", mm);
  m.impl("relu", relu);
  m.impl("erfinv", erfinv);
  m.impl("expm1", expm1);
}

} // namespace

extern "C" {

// 0 silent, 1 a warning each time, 2 one warning in the process (MPS), 3 one per kernel on stderr (torch_npu).
void cppdev_manner(int wanted) {
  manner = wanted;
}

// Kernels that fell back since the last call, one per line.
const char* cppdev_take() {
  std::lock_guard<std::mutex> lock(guard);
  answer = fallen;
  fallen.clear();
  return answer.c_str();
}
}
