#pragma once
namespace cuda { namespace std {
template <class T, class U> struct is_same { static constexpr bool value = false; };
template <class T> struct is_same<T, T> { static constexpr bool value = true; };
template <class T, class U> inline constexpr bool is_same_v = is_same<T, U>::value;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T, class U> struct conditional { typedef T type; };
template <class T, class U> struct conditional<false, T, U> { typedef U type; };
template <class T> struct is_integral { static constexpr bool value = T(1) / T(2) == T(0); };
template <class T> struct is_signed { static constexpr bool value = T(-1) < T(0); };
template <class T> struct is_unsigned { static constexpr bool value = !is_signed<T>::value; };
template <class T> struct is_floating_point { static constexpr bool value = !is_integral<T>::value; };
} }
