package keys

import (
	"encoding/hex"
	"slices"
)

// AppendIDText appends the canonical form of a UUID.
func AppendIDText(dst []byte, id ID) []byte {
	var b [36]byte
	hex.Encode(b[:], id[:4])
	hex.Encode(b[9:], id[4:6])
	hex.Encode(b[14:], id[6:8])
	hex.Encode(b[19:], id[8:10])
	hex.Encode(b[24:], id[10:])
	b[8], b[13], b[18], b[23] = '-', '-', '-', '-'
	return append(dst, b[:]...)
}

// IDTextLen is the length of the canonical form of a UUID.
const IDTextLen = 36

// ParseID reads the canonical form of a UUID.
func ParseID(text []byte) (id ID, ok bool) {
	if len(text) != IDTextLen || text[8] != '-' || text[13] != '-' || text[18] != '-' || text[23] != '-' {
		return id, false
	}
	digits := slices.Concat(text[:8], text[9:13], text[14:18], text[19:23], text[24:])
	_, err := hex.Decode(id[:], digits)
	return id, err == nil
}

// FormatID returns the canonical form of a UUID.
func FormatID(id ID) string { return string(AppendIDText(nil, id)) }
