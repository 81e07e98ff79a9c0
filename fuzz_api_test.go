package codeq_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// FuzzText: the text form of an ID and of a Receipt is refused, or is the only
// one but for the case of its digits.
func FuzzText(f *testing.F) {
	f.Add(codeq.Receipt{ID: sampleID, Token: 1<<63 + 5}.String())
	f.Add(sampleID.String())
	f.Add(codeq.ID{}.String())
	f.Fuzz(func(t *testing.T, text string) {
		var invalid *codeq.InvalidError
		if id, err := codeq.ParseID(text); err == nil {
			require.Equal(t, string(bytes.ToLower([]byte(text))), id.String())
		} else {
			require.ErrorAs(t, err, &invalid)
			require.Zero(t, id)
		}
		var r codeq.Receipt
		if err := r.UnmarshalText([]byte(text)); err == nil {
			require.Equal(t, string(bytes.ToLower([]byte(text))), r.String())
		} else {
			require.ErrorAs(t, err, &invalid)
			require.Zero(t, r)
		}
	})
}
