// Functions of this plug-in under the names that TVM's runtime looks up.
//
// They go through TVM's C interface: no exception crosses from one side to the other there.
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

// Hand a value to the caller.
inline void give(TVMFFIAny* result, tvm::ffi::Any value) {
  *result = tvm::ffi::details::AnyUnsafe::MoveAnyToTVMFFIAny(std::move(value));
}

// Run `body`; 0, or -1 with the error where TVM looks for it.
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

// Registers when the library is loaded, over what is there: this machine's TVM may bring a runtime of its own.
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
