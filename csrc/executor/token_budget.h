// How many prefill rows a step may carry beside the rows of running streams.
#pragma once

#include <algorithm>
#include <cstdlib>

namespace gapless {

// Every running stream waits for the whole step, prefill included, so the prefill is cut to what a target for the time
// per output token (TPOT) leaves. What rows cost is learnt from the steps themselves: now and then, and when the number
// of streams has changed, one step goes without prefill and shows what the streams alone take. Some steps after the
// change, if it is not a large one: a server has most to do for a stream with its first token, and takes the time for
// that from the next steps.
class TokenBudget {
 public:
  explicit TokenBudget(int max_rows) : max_rows_(max_rows) {}

  // 0: automatic. A step with prefill takes 1.6 times as long as without, and longer while there are more sequences
  // whose prompts wait than streams that run: a burst of requests is through its prefill soon.
  void set_target(double seconds) { target_s_ = seconds; }

  // For the step that is being composed: `num_decode` streams and `num_prefill` sequences with prompts to compute.
  // A part of a row is a row that goes through a part of the layers.
  double prefill_rows(int num_decode, int num_prefill) {
    const int room = max_rows_ - num_decode;
    num_steady_ = num_decode == last_num_decode_ ? num_steady_ + 1 : 0;
    last_num_decode_ = num_decode;
    if (num_decode == 0) return room;
    const bool is_due = changed(num_decode, 0.5) || (changed(num_decode, 0.125) && num_steady_ >= kSteadySteps);
    if (!measuring_ && (is_due || age_ >= kRefreshSteps)) {
      measuring_ = true;  // never two in a row: prefill goes on however often streams come and go
      return 0;
    }
    measuring_ = false;
    const double share = kPrefillShare * std::max(1.0, double(num_prefill) / num_decode);
    const double time_s = target_s_ > 0 ? std::max(target_s_ - decode_s_, kLeastShare * decode_s_) : share * decode_s_;
    const double rows = row_s_ > 0 ? time_s / row_s_ : 1;
    return std::min(rows, double(room));
  }

  // What the step took.
  void record(int num_decode, double num_prefill, double seconds) {
    if (num_prefill == 0) {
      // A step that something else on the machine has held up says little: it counts as a quarter longer at most than
      // what is known makes one expect.
      const double most = 1.25 * decode_s_ * std::max(1.0, double(num_decode) / std::max(1, num_decode_));
      const double time_s = num_decode_ > 0 ? std::min(seconds, most) : seconds;
      decode_s_ = changed(num_decode, 0.125) ? time_s : 0.5 * (decode_s_ + time_s);
      num_decode_ = num_decode;
      age_ = 0;
      return;
    }
    ++age_;
    const double row_s = std::max(0.0, num_decode > 0 ? seconds - decode_s_ : seconds) / num_prefill;
    row_s_ = row_s_ == 0 ? row_s : 0.75 * row_s_ + 0.25 * row_s;
  }

 private:
  // Prefill beside running streams takes this much of the streams' own time. Leaves room below the factor 2 that they
  // would notice: steps vary.
  static constexpr double kPrefillShare = 0.6;
  // And never less than this, whatever the target: a prompt must get through.
  static constexpr double kLeastShare = 0.25;
  static constexpr int kRefreshSteps = 16;
  static constexpr int kSteadySteps = 2;

  // Whether there are more or fewer streams by this share than were measured.
  bool changed(int num_decode, double share) const {
    return num_decode_ == 0 || std::abs(num_decode - num_decode_) > share * num_decode_;
  }

  const int max_rows_;
  double target_s_ = 0;
  double decode_s_ = 0, row_s_ = 0;  // the streams alone; one row of prefill
  int num_decode_ = 0;               // of decode_s_
  int age_ = 0;                      // steps since decode_s_ was measured
  int last_num_decode_ = 0;          // of the last step
  int num_steady_ = 0;               // steps before this one with as many streams
  bool measuring_ = false;
};

}  // namespace gapless
