package call

import (
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// formatOfInterests is the format from which on nodes know the numbers of interests.
const formatOfInterests = 7

// AppendInterest appends what a node wants to hear of, for nodes that know a format; gone: it was
// removed.
func AppendInterest(dst []byte, node string, v keys.InterestValue, gone bool, format int) []byte {
	dst = wire.AppendBool(wire.AppendUint(wire.AppendBytes(dst, node), v.Kinds), gone)
	if format >= formatOfInterests {
		dst = wire.AppendUint(wire.AppendUint(dst, v.Life), v.Number)
	}
	return dst
}

// ReadInterest reads what AppendInterest has appended.
func ReadInterest(r *wire.Reader) (node string, v keys.InterestValue, gone bool) {
	node, v.Kinds, gone = r.String(), r.Uint(), r.Bool()
	if r.Len() > 0 {
		v.Life, v.Number = r.Uint(), r.Uint()
	}
	return node, v, gone
}
