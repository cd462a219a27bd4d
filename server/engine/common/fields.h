// Structs that tell their members, by names, to whatever treats all of them alike: for each there is in its
// namespace
//
//   template <class Visit>
//   void Fields(Visit& visit, Is<FoldCommand> auto& command) {
//     auto& [head, from, to] = command;  // all of it: with another member this does not compile
//     visit("head", head, "from", from, "to", to);  // once
//   }
//
// and, where members may have values that make no sense although they are of their types,
//
//   const char* FaultOf(const FoldCommand& command);  // what is wrong, such as "from is 0"; null: nothing is
#ifndef LOSSD_SERVER_ENGINE_COMMON_FIELDS_H_
#define LOSSD_SERVER_ENGINE_COMMON_FIELDS_H_

#include <concepts>
#include <tuple>
#include <type_traits>

namespace lossd::engine {

// Value is Struct, const or not.
template <class Value, class Struct>
concept Is = std::same_as<std::remove_const_t<Value>, Struct>;

// The Fields of a struct by a table of its members, {name, pointer to member}.
template <class Visit, class Struct, class... Members>
void FieldsBy(Visit& visit, Struct& value, const Members&... members) {
  std::apply(visit, std::tuple_cat(std::forward_as_tuple(members.name, value.*members.value)...));
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_FIELDS_H_
