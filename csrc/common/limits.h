// Sizes that several families share.
#pragma once

namespace tlt {

constexpr int kMaxDepth = 16;  // levels below a tree's root; also the length of an ancestor list

}  // namespace tlt
