#include "server/engine/head/parts/head_state_io.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "kernels/data_type.h"

namespace lossd::engine {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;

template <typename T>
std::span<const std::byte> Bytes(const std::vector<T>& values, int64_t count) {
  return std::as_bytes(std::span(values).first(static_cast<size_t>(count)));
}

// Calls `take` with [first, first + count) until there are no more rows of so many bytes.
absl::Status ForPieces(int64_t rows, int64_t row_bytes,
                       absl::FunctionRef<absl::Status(int64_t first, int64_t count)> take) {
  const int64_t most = std::max<int64_t>(1, kPieceBytes / row_bytes);
  for (int64_t first = 0; first < rows; first += most) {
    if (absl::Status taken = take(first, std::min(most, rows - first)); !taken.ok()) return taken;
  }
  return absl::OkStatus();
}

size_t PieceRows(int64_t rows, int64_t row_bytes) {
  return static_cast<size_t>(std::min(rows, std::max<int64_t>(1, kPieceBytes / row_bytes)));
}

bool IsWeight(const std::string& tensor) {
  return tensor == "weight" || tensor == kMasterTensor || tensor == "bias";
}

// All of `tiles.kept`, one chunk behind the other.
absl::Status AppendTiles(const DeterministicTiles::Content& tiles, const StateSink::Append& append) {
  for (const Chunk& chunk : tiles.kept) {
    for (const std::string* values :
         {&chunk.labels, &chunk.token_weights, &chunk.lse_gradients, &chunk.entropy_gradients,
          &chunk.lists.offsets, &chunk.lists.tokens, &chunk.lists.probabilities}) {
      if (absl::Status status = append(std::as_bytes(std::span(*values))); !status.ok()) return status;
    }
    for (const ByteSpan part : chunk.hidden_states.parts()) {
      if (absl::Status status = append(part); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

FileSizes SizesOf(const HeadConfig& config, const std::vector<StateTensor>& tensors,
                  const std::vector<std::string>& gradients) {
  FileSizes sizes;
  for (const StateTensor& tensor : tensors) {
    sizes[TensorFile(tensor.name)] = tensor.rows * tensor.columns * kernels::SizeOf(tensor.type);
  }
  for (const std::string& gradient : gradients) {
    sizes[gradient] = config.gradient_bytes();
    if (config.bias) sizes[BiasOf(gradient)] = config.bias_gradient_bytes();
  }
  return sizes;
}

const std::string& KeyOf(const StateKeys& keys, const StateTensor& tensor) {
  return IsWeight(tensor.name) ? keys.weights : keys.optimizer;
}

absl::Status HeadStateWriter::Write(CapturedHead* head) {
  HeadCheckpoint& state = head->state;
  if (state.weight_version > 0) state.tensors = backend_.StateTensors();
  absl::Status status;
  for (const StateTensor& tensor : state.tensors) {
    if (status.ok()) status = WriteTensor(tensor, head->keys);
  }
  for (const GradientFile& file : head->gradients) {
    state.gradients.push_back(file.name);
    if (status.ok()) status = WriteGradient(file, head->keys);
  }
  for (const SessionCheckpoint& session : state.sessions) {
    if (!status.ok() || !session.tiles.has_value() || session.tiles->kept.empty()) continue;
    status = sink_.Add(TilesFile(session.session.number), "",
                       [&session](const auto& append) { return AppendTiles(*session.tiles, append); });
  }
  return status;
}

absl::Status HeadStateWriter::WriteTensor(const StateTensor& tensor, const StateKeys& keys) {
  const int64_t row_bytes = tensor.columns * kernels::SizeOf(tensor.type);
  return sink_.Add(TensorFile(tensor.name), KeyOf(keys, tensor), [&](const StateSink::Append& append) {
    std::vector<std::byte> piece(PieceRows(tensor.rows, row_bytes) * static_cast<size_t>(row_bytes));
    return ForPieces(tensor.rows, row_bytes, [&](int64_t first, int64_t count) {
      device_ = backend_.ReadState(tensor.name, first, count, piece.data());
      return device_.ok() ? append(Bytes(piece, count * row_bytes)) : device_;
    });
  });
}

absl::Status HeadStateWriter::WriteGradient(const GradientFile& file, const StateKeys& keys) {
  const auto write = [&](const std::string& name, int64_t columns, auto read) {
    const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(float));
    return sink_.Add(name, keys.gradients, [&](const StateSink::Append& append) {
      std::vector<float> piece(PieceRows(config_.vocab_size, row_bytes) * static_cast<size_t>(columns));
      return ForPieces(config_.vocab_size, row_bytes, [&](int64_t first, int64_t count) {
        device_ = read(first, count, piece.data());
        return device_.ok() ? append(Bytes(piece, count * columns)) : device_;
      });
    });
  };
  absl::Status written = write(file.name, config_.hidden_size, [&](int64_t first, int64_t count, float* out) {
    return backend_.ReadGradient(file.gradient, first, count, out);
  });
  if (!written.ok() || !config_.bias) return written;
  return write(BiasOf(file.name), 1, [&](int64_t first, int64_t count, float* out) {
    return backend_.ReadBiasGradient(file.gradient, first, count, out);
  });
}

absl::Status HeadStateReader::ReadTensors() {
  for (const StateTensor& tensor : state().tensors) {
    const int64_t row_bytes = tensor.columns * kernels::SizeOf(tensor.type);
    std::vector<std::byte> piece(PieceRows(tensor.rows, row_bytes) * static_cast<size_t>(row_bytes));
    absl::Status status = ForPieces(tensor.rows, row_bytes, [&](int64_t first, int64_t count) {
      const std::span<std::byte> rows = std::span(piece).first(static_cast<size_t>(count * row_bytes));
      absl::Status read = source_.Read(TensorFile(tensor.name), first * row_bytes, rows);
      return read.ok() ? OfDevice(backend_.WriteState(tensor.name, first, count, rows.data())) : read;
    });
    if (!status.ok()) return status;
  }
  return state().tensors.empty() ? absl::OkStatus() : OfDevice(backend_.RestoreState());
}

absl::Status HeadStateReader::OfDevice(absl::Status status) {
  device_.Update(status);
  return status;
}

absl::Status HeadStateReader::ReadGradient(const std::string& name, Gradient* gradient) {
  const std::vector<std::string>& there = state().gradients;
  if (std::find(there.begin(), there.end(), name) == there.end()) {
    backend_.Reset(gradient);
    return absl::OkStatus();
  }
  const int64_t row_bytes = config_.hidden_size * static_cast<int64_t>(sizeof(float));
  const size_t most = PieceRows(config_.vocab_size, row_bytes);
  std::vector<float> piece(most * static_cast<size_t>(config_.hidden_size));
  std::vector<float> bias(config_.bias ? most : 0);
  return ForPieces(config_.vocab_size, row_bytes, [&](int64_t first, int64_t count) {
    const auto part = [count](std::vector<float>& values, int64_t columns) {
      return std::as_writable_bytes(std::span(values).first(static_cast<size_t>(count * columns)));
    };
    absl::Status read = source_.Read(name, first * row_bytes, part(piece, config_.hidden_size));
    if (read.ok() && config_.bias) {
      read = source_.Read(BiasOf(name), first * static_cast<int64_t>(sizeof(float)), part(bias, 1));
    }
    if (!read.ok()) return read;
    return OfDevice(
        backend_.WriteGradient(gradient, first, count, piece.data(), config_.bias ? bias.data() : nullptr));
  });
}

}  // namespace lossd::engine
