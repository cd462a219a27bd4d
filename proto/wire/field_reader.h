// Walks over the fields of a protobuf message that lies in slices, without copying their content.
#ifndef LOSSD_PROTO_WIRE_FIELD_READER_H_
#define LOSSD_PROTO_WIRE_FIELD_READER_H_

#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lossd::wire {

// Every reading function is false at what it does not take: bytes that end too early, and encodings that are
// valid but that no library writes (groups, numbers with more bytes than their type needs at most).
class FieldReader {
 public:
  static constexpr uint32_t kLengthDelimited = 2;

  struct Mark {
    size_t slice = 0;
    size_t offset = 0;
    int64_t remaining = 0;
  };

  // `slices` outlive the reader and the spans taken.
  explicit FieldReader(const std::vector<grpc::Slice>& slices);

  // Bytes not read yet.
  int64_t remaining() const { return at_.remaining; }
  Mark mark() const { return at_; }

  bool ReadTag(uint32_t* tag);
  // The size of a length-delimited field: no more than remaining().
  bool ReadSize(int64_t* size);
  // The value that follows `tag`.
  bool SkipValue(uint32_t tag);
  // The next `size` bytes, at most remaining(), as spans.
  void Take(int64_t size, std::vector<std::span<const std::byte>>* parts);
  // Everything read since `mark`.
  void AppendSince(const Mark& mark, std::string* out) const;

 private:
  // At most `most_bytes` of seven bits each.
  bool ReadVarint(int most_bytes, uint64_t* value);
  bool Skip(int64_t size);
  // The rest of the slice at `at`, but no more than `size` bytes, and moves past it.
  std::span<const std::byte> Next(int64_t size, Mark* at) const;

  const std::vector<grpc::Slice>& slices_;
  Mark at_;
};

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_FIELD_READER_H_
