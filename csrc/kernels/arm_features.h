#pragma once

namespace pyfly::kernels {

// Whether this processor has SDOT (FEAT_DotProd), and whether it has SMMLA as well (FEAT_I8MM). False where the system
// does not tell.
bool has_dot_products();
bool has_matrix_products();

} // namespace pyfly::kernels
