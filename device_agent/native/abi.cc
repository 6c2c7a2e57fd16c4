// See abi.h.
// SPDX-License-Identifier: Apache-2.0
#include "abi.h"

template class std::basic_string<char>;
template std::string std::operator+ <char, std::char_traits<char>, std::allocator<char>>(const char*, const std::string&);

namespace farm {

void fail(const std::string& message) { throw tvm::ffi::Error("CUDAError", message, std::string()); }

std::string text(long long value) {
  bool negative = value < 0;
  unsigned long long left = negative ? 0ULL - static_cast<unsigned long long>(value) : static_cast<unsigned long long>(value);
  std::string digits;
  do {
    digits.insert(digits.begin(), static_cast<char>('0' + left % 10));
    left /= 10;
  } while (left > 0);
  return negative ? "-" + digits : digits;
}

}  // namespace farm

// libstdc++ defines these in its headers only.
namespace std {
bad_alloc::bad_alloc() noexcept {}
bad_array_new_length::bad_array_new_length() noexcept {}
}  // namespace std
