#include "platform/cpu.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace gapless {

namespace {

#if defined(__x86_64__)
// State components that the operating system saves: YMM needs bits 1-2, ZMM bits 5-7 as well.
uint64_t xcr0() {
  uint32_t eax, edx;
  __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (uint64_t(edx) << 32) | eax;
}

bool has_avx2() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  const bool osxsave = c & (1u << 27), fma = c & (1u << 12), f16c = c & (1u << 29);
  if (!osxsave || !fma || !f16c || (xcr0() & 0x6) != 0x6) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 5));
}

bool has_avx512() {
  unsigned a, b, c, d;
  if (!has_avx2() || (xcr0() & 0xe6) != 0xe6) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned needed = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  const bool vnni = c & (1u << 11);
  if ((b & needed) != needed || !vnni) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));  // BF16
}

#if defined(GAPLESS_HAS_AMX)
// Tiles need bits 17-18 of XCR0 and, for the whole process, Linux's leave: it would otherwise kill the first thread
// that touches them. It refuses where an alternate signal stack of the process is too small for their 8 KB.
bool has_amx() {
  unsigned a, b, c, d;
  if (!has_avx512() || (xcr0() & 0x60000) != 0x60000) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned needed = (1u << 24) | (1u << 25);  // TILE, INT8
  if ((d & needed) != needed) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
}
#endif
#endif

// First line of a file, or "" when it can't be read.
std::string read_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// CPUs that a pair of numbers in microseconds allows; infinity unless both are there and positive ("max", "-1", no
// file).
double quota_of(const std::string& quota_and_period) {
  std::istringstream in(quota_and_period);
  double quota = 0, period = 0;
  return in >> quota >> period && quota > 0 && period > 0 ? quota / period : std::numeric_limits<double>::infinity();
}

double quota_v2(const std::string& directory) { return quota_of(read_line(directory + "/cpu.max")); }

double quota_v1(const std::string& directory) {
  return quota_of(read_line(directory + "/cpu.cfs_quota_us") + " " + read_line(directory + "/cpu.cfs_period_us"));
}

// The smallest quota from `path` up to the root of the hierarchy mounted at `mount`.
template <typename Quota>
double smallest_up_to_root(const std::string& mount, std::string path, Quota quota) {
  double smallest = quota(mount);
  while (!path.empty() && path != "/") {
    smallest = std::min(smallest, quota(mount + path));
    path.resize(path.rfind('/'));
  }
  return smallest;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::generic:
      return "generic";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::amx:
      return "amx";
    case Isa::neon:
      return "neon";
  }
  return "unknown";
}

std::vector<Isa> usable_isas() {
  std::vector<Isa> isas = {Isa::generic};
#if defined(__x86_64__)
  if (has_avx2()) isas.push_back(Isa::avx2);
  if (has_avx512()) isas.push_back(Isa::avx512);
#if defined(GAPLESS_HAS_AMX)
  if (has_amx()) isas.push_back(Isa::amx);
#endif
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) isas.push_back(Isa::neon);
#endif
  return isas;
}

Isa isa_from_name(const std::string& name) {
  std::string known;
  for (Isa isa : usable_isas()) {
    if (name == isa_name(isa)) return isa;
    known += std::string(known.empty() ? "" : ", ") + isa_name(isa);
  }
  throw std::invalid_argument("ISA '" + name + "' is not usable here; this machine runs: " + known);
}

std::vector<int> affinity_cpus() {
  // Grow the mask until it holds the machine: hosts with more than 1024 CPUs refuse the default size.
  for (int size = 1024; size <= 1 << 20; size *= 2) {
    cpu_set_t* set = CPU_ALLOC(size);
    const bool ok = sched_getaffinity(0, CPU_ALLOC_SIZE(size), set) == 0;
    std::vector<int> cpus;
    for (int cpu = 0; ok && cpu < size; ++cpu)
      if (CPU_ISSET_S(cpu, CPU_ALLOC_SIZE(size), set)) cpus.push_back(cpu);
    CPU_FREE(set);
    if (!cpus.empty()) return cpus;
  }
  return {0};
}

double cgroup_cpu_quota(const std::string& root, const std::string& proc) {
  double quota = std::numeric_limits<double>::infinity();
  std::ifstream in(proc + "/cgroup");
  // Lines are "id:controllers:path"; v2 has the one line "0::path".
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    const std::string base = root + "/sys/fs/cgroup";
    if (controllers == ",,") {
      for (const char* mount : {"", "/unified"})
        quota = std::min(quota, smallest_up_to_root(base + mount, path, quota_v2));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      for (const char* mount : {"/cpu", "/cpu,cpuacct"})
        quota = std::min(quota, smallest_up_to_root(base + mount, path, quota_v1));
    }
  }
  return quota;
}

int default_num_threads() {
  std::set<std::string> cores;  // one entry per physical core: its list of sibling threads
  const std::vector<int> cpus = affinity_cpus();
  for (int cpu : cpus) {
    const std::string topology = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    const std::string siblings = read_line(topology + "thread_siblings_list");
    cores.insert(siblings.empty() ? std::to_string(cpu) : siblings);
  }
  const double limit = std::min<double>(double(cores.size()), std::floor(cgroup_cpu_quota() + 1e-9));
  return std::max(1, int(limit));
}

}  // namespace gapless
