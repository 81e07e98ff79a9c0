package call

import (
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// AppendInterest appends the interests of a node; gone: it was removed.
func AppendInterest(dst []byte, node string, v keys.InterestValue, gone bool) []byte {
	dst = wire.AppendBool(wire.AppendUint(wire.AppendBytes(dst, node), v.Kinds), gone)
	return wire.AppendUint(wire.AppendUint(dst, v.Incarnation), v.Number)
}

// ReadInterest reads what AppendInterest has appended.
func ReadInterest(r *wire.Reader) (node string, v keys.InterestValue, gone bool) {
	node, v.Kinds, gone = r.String(), r.Uint(), r.Bool()
	v.Incarnation, v.Number = r.Uint(), r.Uint()
	return node, v, gone
}
