// Read kernels from a cubin: an ELF file with a section of code for each, and sections that describe them.
// SPDX-License-Identifier: Apache-2.0
#include <elf.h>

#include <algorithm>
#include <cstring>

#include "sass.h"

namespace sass {
namespace {

// Attributes of .nv.info sections (format in the first byte, then these).
constexpr u8 kFormatSized = 4;
constexpr u8 kParameter = 0x17, kParameterBank = 0x0a;

class File {
 public:
  File(const u8* data, size_t size) : data_(data), size_(size) {
    if (size < sizeof(Elf64_Ehdr) || std::memcmp(data, ELFMAG, SELFMAG) != 0) throw std::string("no cubin");
    std::memcpy(&header_, data, sizeof(header_));
    if (header_.e_machine != EM_CUDA || header_.e_shentsize != sizeof(Elf64_Shdr)) throw std::string("no cubin");
    require(header_.e_shoff, size_t{header_.e_shnum} * sizeof(Elf64_Shdr));
    sections_.resize(header_.e_shnum);
    std::memcpy(sections_.data(), data + header_.e_shoff, sections_.size() * sizeof(Elf64_Shdr));
    // A section without bytes has no names.
    if (header_.e_shstrndx >= sections_.size() || sections_[header_.e_shstrndx].sh_type == SHT_NOBITS)
      throw std::string("a cubin cut short");
    for (const Elf64_Shdr& each : sections_) {
      if (each.sh_type != SHT_NOBITS) require(each.sh_offset, each.sh_size);
    }
  }

  const std::vector<Elf64_Shdr>& sections() const { return sections_; }
  std::string name(const Elf64_Shdr& section) const {
    const Elf64_Shdr& names = sections_[header_.e_shstrndx];
    if (section.sh_name >= names.sh_size) throw std::string("a cubin cut short");
    const char* text = reinterpret_cast<const char*>(data_ + names.sh_offset) + section.sh_name;
    return std::string(text, strnlen(text, names.sh_size - section.sh_name));
  }
  std::vector<u8> bytes(const Elf64_Shdr& section) const {
    if (section.sh_type == SHT_NOBITS) return {};
    return std::vector<u8>(data_ + section.sh_offset, data_ + section.sh_offset + section.sh_size);
  }
  unsigned capability() const { return header_.e_flags & 0xff; }

 private:
  void require(u64 offset, u64 bytes) const {
    if (offset > size_ || bytes > size_ - offset) throw std::string("a cubin cut short");
  }

  const u8* data_;
  size_t size_;
  Elf64_Ehdr header_;
  std::vector<Elf64_Shdr> sections_;
};

u32 word(const std::vector<u8>& bytes, size_t at) {
  u32 value = 0;
  if (at + 4 <= bytes.size()) std::memcpy(&value, bytes.data() + at, 4);
  return value;
}

void read_info(const std::vector<u8>& info, Kernel* kernel) {
  for (size_t at = 0; at + 4 <= info.size();) {
    u8 format = info[at], attribute = info[at + 1];
    size_t size = format == kFormatSized ? word(info, at) >> 16 : 0;
    if (format == kFormatSized && attribute == kParameter && size >= 12) {
      u32 ordinal = word(info, at + 8) & 0xffff, offset = word(info, at + 8) >> 16, bytes = word(info, at + 12) >> 18;
      if (ordinal >= kernel->parameters.size()) kernel->parameters.resize(ordinal + 1);
      kernel->parameters[ordinal] = {offset, bytes};
    }
    if (format == kFormatSized && attribute == kParameterBank && size >= 8) {
      kernel->parameters_at = word(info, at + 8) & 0xffff, kernel->parameter_bytes = word(info, at + 8) >> 16;
    }
    at += 4 + size;
  }
}

// What is at fixed places before the parameters, and the most shared memory that a block can have.
constexpr u32 kLeastParametersAt = 0x24, kMostSharedBytes = 96 << 10;

void require_sound(const Kernel& kernel) {
  bool sound = kernel.parameters_at >= kLeastParametersAt && kernel.shared_bytes <= kMostSharedBytes;
  for (auto [offset, size] : kernel.parameters) sound = sound && u64{offset} + size <= kernel.parameter_bytes;
  if (!sound) throw std::string("a kernel without sound parameters");
}

}  // namespace

std::map<std::string, Kernel> read_cubin(const u8* data, size_t size) {
  File file(data, size);
  if (file.capability() < 50 || file.capability() > 62)
    throw std::string("machine code of another GPU than Maxwell or Pascal");
  std::map<std::string, Kernel> found;
  for (const Elf64_Shdr& section : file.sections()) {
    std::string name = file.name(section);
    if (name.rfind(".text.", 0) != 0) continue;
    Kernel& kernel = found[name.substr(6)];
    kernel.name = name.substr(6);
    kernel.registers = section.sh_info >> 24;
    std::vector<u8> code = file.bytes(section);
    std::vector<u64> words(code.size() / 8);
    if (!words.empty()) std::memcpy(words.data(), code.data(), words.size() * 8);
    decode(words.data(), words.size(), &kernel);
  }
  for (const Elf64_Shdr& section : file.sections()) {
    std::string name = file.name(section);
    for (auto& [kernel_name, kernel] : found) {
      if (name == ".nv.info." + kernel_name) read_info(file.bytes(section), &kernel);
      if (name == ".nv.shared." + kernel_name)
        kernel.shared_bytes = static_cast<u32>(std::min<u64>(section.sh_size, kMostSharedBytes + 1));
      if (name.rfind(".nv.constant", 0) == 0 && name.size() > 14 && name.substr(14) == kernel_name) {
        kernel.banks[name[12] - '0'] = file.bytes(section);
      }
    }
  }
  for (const auto& [name, kernel] : found) require_sound(kernel);
  return found;
}

}  // namespace sass
