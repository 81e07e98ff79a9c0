package testbase

import (
	"encoding/hex"
	"strings"
)

// Unhex reads hexadecimal digits; blanks separate the fields.
func Unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}
