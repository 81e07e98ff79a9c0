package keys

import "encoding/hex"

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

// FormatID returns the canonical form of a UUID.
func FormatID(id ID) string { return string(AppendIDText(nil, id)) }
