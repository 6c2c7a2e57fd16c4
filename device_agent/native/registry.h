// Functions of this plug-in under the names that TVM's runtime looks up.
//
// They use TVM's C interface, which no exception crosses.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tvm/ffi/any.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/error.h>

#include <cstring>
#include <initializer_list>
#include <utility>

namespace farm {

// May throw. `result` holds None on entry; see `give`.
using Packed = void (*)(const TVMFFIAny* arguments, int count, TVMFFIAny* result);

struct Registered {
  const char* name;
  Packed function;
};

// Return a value to the caller.
inline void give(TVMFFIAny* result, tvm::ffi::Any value) {
  *result = tvm::ffi::details::AnyUnsafe::MoveAnyToTVMFFIAny(std::move(value));
}

// Run `body`; 0, or -1 with the error set for TVM.
template <typename Body>
int guard(Body body) noexcept {
  try {
    body();
    return 0;
  } catch (const tvm::ffi::Error& error) {
    tvm::ffi::details::SetSafeCallRaised(error);
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr("InternalError", error.what());
  }
  return -1;
}

inline int call_packed(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  return guard([&] { reinterpret_cast<Packed>(self)(arguments, count, result); });
}

// Registers at load time and overrides existing functions: this machine's TVM may have a CUDA runtime of its own.
struct Registration {
  Registration(std::initializer_list<Registered> entries) {
    for (const Registered& each : entries) {
      TVMFFIObjectHandle function = nullptr;
      TVMFFIByteArray name{each.name, std::strlen(each.name)};
      if (TVMFFIFunctionCreate(reinterpret_cast<void*>(each.function), call_packed, nullptr, &function) != 0) continue;
      TVMFFIFunctionSetGlobal(&name, function, 1);
      TVMFFIObjectDecRef(function);
    }
  }
};

}  // namespace farm
