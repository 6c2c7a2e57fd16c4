// Lets this plug-in throw through TVM's runtime, which another compiler built. Include it before TVM's headers.
//
// TVM's libraries run on libstdc++; this is compiled with the libc++ headers that zig brings and linked without libc++,
// so that exceptions, run-time types and `new` are libstdc++'s, which TVM has loaded. What libc++ keeps in its library
// (streams, std::to_string, std::mutex) is unavailable. Strings are instantiated here (abi.cc).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tvm/ffi/error.h>

#include <string>

namespace farm {

// Throw tvm::ffi::Error of the kind CUDAError with `message`.
[[noreturn]] void fail(const std::string& message);

// In decimal digits.
std::string text(long long value);

// Replaces TVM's own checks, which write to a stream.
struct Check {
  template <typename T>
  Check& operator<<(const T&) {
    return *this;
  }
  ~Check() noexcept(false) { fail("TVM's headers refuse a value"); }
};

}  // namespace farm

#undef TVM_FFI_THROW
#define TVM_FFI_THROW(kind) ::farm::Check()
