// From the rows of a GGUF file to panels (layout.h), and back.
#pragma once

#include <cstddef>

#include "layout.h"

namespace pyfly::kernels {

// Whether a matrix of this type and shape can be packed: rows of whole blocks.
bool can_pack(WeightType type, size_t n_in, size_t n_out);

// Bytes of a panel. Requires can_pack().
size_t panel_bytes(WeightType type, size_t n_in);

// Bytes of a row as a GGUF file has it.
size_t row_bytes(WeightType type, size_t n_in);

// Panels of a matrix; the last one may be for fewer than 16 outputs.
size_t n_panels(size_t n_out);

// Packs n_rows <= 16 rows, row_bytes() apart, into a panel; what is missing of it becomes zeros. Any thread may pack
// any panel.
void pack_panel(WeightType type, size_t n_in, const uint8_t * rows, size_t n_rows, uint8_t * out);

// Writes the n_rows <= 16 rows that pack_panel() packed: the same bytes.
void unpack_panel(WeightType type, size_t n_in, const uint8_t * packed, size_t n_rows, uint8_t * rows);

} // namespace pyfly::kernels
