// How many CPUs a process may use, read off made-up cgroup trees.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "check.h"
#include "platform/cpu.h"

using namespace gapless;
namespace fs = std::filesystem;

namespace {

struct Tree {
  fs::path root;

  explicit Tree(const char* name) : root(fs::temp_directory_path() / (std::string("gapless-cgroup-") + name)) {
    fs::remove_all(root);
  }
  ~Tree() { fs::remove_all(root); }
  void write(const std::string& path, const std::string& text) const {
    const fs::path file = root.string() + path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  double quota() const { return cgroup_cpu_quota(root.string(), root.string() + "/proc"); }
};

void test_no_cgroup() { CHECK(std::isinf(Tree("none").quota())); }

void test_v2_takes_the_smallest_ancestor() {
  Tree tree("v2");
  tree.write("/proc/cgroup", "0::/kubepods/pod1/container");
  tree.write("/sys/fs/cgroup/kubepods/pod1/container/cpu.max", "max 100000");
  tree.write("/sys/fs/cgroup/kubepods/pod1/cpu.max", "400000 100000");
  tree.write("/sys/fs/cgroup/kubepods/cpu.max", "800000 100000");
  CHECK(tree.quota() == 4.0);
}

void test_v2_at_the_root_of_a_namespace() {
  Tree tree("v2root");
  tree.write("/proc/cgroup", "0::/");
  tree.write("/sys/fs/cgroup/cpu.max", "150000 100000");
  CHECK(tree.quota() == 1.5);
}

void test_v1() {
  Tree tree("v1");
  tree.write("/proc/cgroup", "4:memory:/a\n3:cpu,cpuacct:/docker/abc\n0::/");
  tree.write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "-1");
  tree.write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000");
  tree.write("/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us", "50000");
  tree.write("/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us", "25000");
  CHECK(tree.quota() == 2.0);
}

// A container's own path is not visible inside it, but its files are at the mount.
void test_v1_path_of_the_host() {
  Tree tree("v1host");
  tree.write("/proc/cgroup", "3:cpu:/docker/abc");
  tree.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000");
  tree.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  CHECK(tree.quota() == 3.0);
}

void test_nonsense_is_no_limit() {
  Tree tree("bad");
  tree.write("/proc/cgroup", "0::/x\n\nrubbish\n7:cpu:/y");
  tree.write("/sys/fs/cgroup/x/cpu.max", "many of them");
  tree.write("/sys/fs/cgroup/cpu/y/cpu.cfs_quota_us", "a lot");
  tree.write("/sys/fs/cgroup/cpu/y/cpu.cfs_period_us", "");
  CHECK(std::isinf(tree.quota()));
}

}  // namespace

int main() {
  test_no_cgroup();
  test_v2_takes_the_smallest_ancestor();
  test_v2_at_the_root_of_a_namespace();
  test_v1();
  test_v1_path_of_the_host();
  test_nonsense_is_no_limit();
  CHECK(default_num_threads() >= 1);
  CHECK(default_num_threads() <= int(affinity_cpus().size()));
  CHECK(usable_isas().front() == Isa::generic);
  return check::finish("cpu");
}
