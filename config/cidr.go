package config

import (
	"errors"
	"fmt"
	"math/big"
	"net/netip"

	"github.com/zclconf/go-cty/cty"
	"github.com/zclconf/go-cty/cty/function"
)

// cidrFunction wraps f as an HCL function of an address range and whole numbers.
func cidrFunction(numbers int, f func(netip.Prefix, []*big.Int) (string, error)) function.Function {
	params := []function.Parameter{{Name: "prefix", Type: cty.String}}
	for range numbers {
		params = append(params, function.Parameter{Name: "number", Type: cty.Number})
	}
	return function.New(&function.Spec{
		Params: params,
		Type:   function.StaticReturnType(cty.String),
		Impl: func(args []cty.Value, _ cty.Type) (cty.Value, error) {
			prefix, err := netip.ParsePrefix(args[0].AsString())
			if err != nil {
				return cty.DynamicVal, function.NewArgErrorf(0, `this is not an address range, as in "10.1.0.0/16"`)
			}
			var whole []*big.Int
			for i, v := range args[1:] {
				n, exact := v.AsBigFloat().Int(nil)
				if exact != big.Exact {
					return cty.DynamicVal, function.NewArgErrorf(i+1, "a whole number is wanted")
				}
				whole = append(whole, n)
			}
			s, err := f(prefix.Masked(), whole)
			return cty.StringVal(s), err
		},
	})
}

// hostAddress returns the address with that number in the range. A negative number counts from the range's end.
func hostAddress(p netip.Prefix, n []*big.Int) (string, error) {
	at, size := n[0], new(big.Int).Lsh(big.NewInt(1), uint(p.Addr().BitLen()-p.Bits()))
	if at.Sign() < 0 {
		at = new(big.Int).Add(at, size)
	}
	if at.Sign() < 0 || at.Cmp(size) >= 0 {
		return "", fmt.Errorf("%s has no address of the number %s", p, n[0])
	}
	return plus(p.Addr(), at).String(), nil
}

// netmask returns the mask of an IPv4 range.
func netmask(p netip.Prefix, _ []*big.Int) (string, error) {
	if !p.Addr().Is4() {
		return "", errors.New("only IPv4 ranges have a netmask")
	}
	all, _ := netip.AddrFrom4([4]byte{255, 255, 255, 255}).Prefix(p.Bits())
	return all.Addr().String(), nil
}

// subnet returns the subnet with that number after extending the prefix by a number of bits.
func subnet(p netip.Prefix, n []*big.Int) (string, error) {
	more, number, width := n[0], n[1], p.Addr().BitLen()-p.Bits()
	if more.Sign() < 0 || more.Cmp(big.NewInt(int64(width))) > 0 {
		return "", fmt.Errorf("%s has room for 0 to %d bits more", p, width)
	}
	bits := uint(more.Int64())
	if number.Sign() < 0 || number.Cmp(new(big.Int).Lsh(big.NewInt(1), bits)) >= 0 {
		return "", fmt.Errorf("%s is not the number of a subnet: %d bits number them", number, bits)
	}
	start := plus(p.Addr(), new(big.Int).Lsh(number, uint(width)-bits))
	return netip.PrefixFrom(start, p.Bits()+int(bits)).String(), nil
}

// plus returns a + n. The caller ensures that this address exists.
func plus(a netip.Addr, n *big.Int) netip.Addr {
	sum := new(big.Int).Add(new(big.Int).SetBytes(a.AsSlice()), n)
	next, _ := netip.AddrFromSlice(sum.FillBytes(make([]byte, a.BitLen()/8)))
	return next
}
