// Read a cubin after random changes, as many times as asked: `cubin_fuzz FILE TIMES`. Built with AddressSanitizer, it
// ends at the first read beyond the file's bytes.
// SPDX-License-Identifier: Apache-2.0
#include <elf.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>

#include "sass.h"

int main(int, char** arguments) {
  std::ifstream file(arguments[1], std::ios::binary);
  const std::vector<char> whole{std::istreambuf_iterator<char>(file), {}};
  Elf64_Ehdr header;
  std::memcpy(&header, whole.data(), sizeof(header));
  std::mt19937_64 random(1);
  const sass::u64 odd[] = {0, 1, 7, SHT_NOBITS, 0xff, 0xffff, 0x7fffffff, 0xffffffff, sass::u64{1} << 32, ~sass::u64{0}};
  long taken = 0, times = std::atol(arguments[2]);
  for (long i = 0; i < times; ++i) {
    const size_t size = random() % 8 ? whole.size() : 1 + random() % whole.size();
    // Of exactly this size, so that the next byte is not its own.
    std::unique_ptr<sass::u8[]> data(new sass::u8[size]);
    std::memcpy(data.get(), whole.data(), size);
    auto change = [&](size_t at, size_t width) {
      const sass::u64 value = random() % 3 ? odd[random() % std::size(odd)] : random() % (2 * whole.size());
      at = at / width * width;
      if (at + width <= size) std::memcpy(data.get() + at, &value, width);
    };
    // A section's type and place, a header, or anything.
    const size_t section = header.e_shoff + random() % header.e_shnum * sizeof(Elf64_Shdr);
    if (random() % 2) {
      change(section + offsetof(Elf64_Shdr, sh_type), 4);
      change(section + offsetof(Elf64_Shdr, sh_offset), 8);
      change(section + offsetof(Elf64_Shdr, sh_size), 8);
    }
    for (sass::u64 left = random() % 4; left > 0; --left) {
      const size_t places[] = {random() % sizeof(header), section + random() % sizeof(Elf64_Shdr), random() % size};
      change(places[random() % 3], size_t{1} << random() % 4);
    }
    try {
      sass::read_cubin(data.get(), size);
      ++taken;
    } catch (const std::string&) {
    }
  }
  std::printf("%ld of %ld are taken\n", taken, times);
}
