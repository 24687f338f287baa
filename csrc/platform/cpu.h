// What this machine is: instruction sets, and how many threads it pays to run.
#pragma once

#include <string>
#include <vector>

namespace gapless {

enum class Isa { generic, avx2, avx512, amx, neon };  // amx: AVX-512 with the tile unit for many rows

const char* isa_name(Isa isa);

// The ISAs that this build has and this CPU (and its operating system) can run, best last.
std::vector<Isa> usable_isas();

// Throws std::invalid_argument, naming the usable ones, when `name` is not among them.
Isa isa_from_name(const std::string& name);

// CPUs this process may run on (sched affinity), in ascending order.
std::vector<int> affinity_cpus();

// CPU quota of the process's cgroup and all its ancestors, v1 or v2, in CPUs; infinity when there is none.
// `root` and `proc` stand for "/" and "/proc/self" so that tests can point at a made-up tree.
double cgroup_cpu_quota(const std::string& root = "", const std::string& proc = "/proc/self");

// min(affinity, cgroup quota, physical cores within the affinity), at least 1.
int default_num_threads();

}  // namespace gapless
