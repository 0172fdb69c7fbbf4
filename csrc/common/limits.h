// Sizes that several families share.
#pragma once

namespace tlt {

constexpr int kMaxDepth = 16;  // levels below a tree's root; also the length of an ancestor list
constexpr int kMaxPassTokens = kMaxDepth + 1;  // tokens of a request in a pass: the target adds one
constexpr int kMaxTopK = 128;                  // children of a node
constexpr int kMaxTreeRows = 128;              // rows of a request in a verify pass, root included
constexpr int kMaxDraftSlots = 256;  // rows of a drafter in flight; ancestor lists hold bytes
constexpr int kMaxHeadDim = 256;
constexpr double kMinScoreTemperature = 1e-6;  // 0 is allowed too

}  // namespace tlt
