package codeq_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq"
	"codeq/internal/keys"
)

const (
	sampleIDText      = "0193b3c0-1234-7abc-8500-0102deadbeef"
	sampleReceiptText = sampleIDText + ".fedcba9876543210"
)

func drawAnyID(t *rapid.T) codeq.ID {
	return codeq.ID(rapid.SliceOfN(rapid.Byte(), keys.IDLen, keys.IDLen).Draw(t, "id"))
}

var (
	sampleID      = codeq.ID{0x01, 0x93, 0xb3, 0xc0, 0x12, 0x34, 0x7a, 0xbc, 0x85, 0, 1, 2, 0xde, 0xad, 0xbe, 0xef}
	sampleReceipt = codeq.Receipt{ID: sampleID, Token: 0xfedcba9876543210}
)

func TestIDText(t *testing.T) {
	require.Equal(t, sampleIDText, sampleID.String())
	id, err := codeq.ParseID(sampleIDText)
	require.NoError(t, err)
	require.Equal(t, sampleID, id)
	id, err = codeq.ParseID(strings.ToUpper(sampleIDText))
	require.NoError(t, err, "RFC 9562: either case is read")
	require.Equal(t, sampleID, id)

	rapid.Check(t, func(t *rapid.T) {
		id := drawAnyID(t)
		got, err := codeq.ParseID(id.String())
		require.NoError(t, err)
		require.Equal(t, id, got)
		b, err := json.Marshal(map[codeq.ID]codeq.ID{id: id})
		require.NoError(t, err)
		var m map[codeq.ID]codeq.ID
		require.NoError(t, json.Unmarshal(b, &m))
		require.Equal(t, map[codeq.ID]codeq.ID{id: id}, m)
	})
}

// withByte returns s with another byte at i.
func withByte(s string, i int, c byte) string { return s[:i] + string(c) + s[i+1:] }

func TestIDTextRefused(t *testing.T) {
	refused := []string{
		"", "-", strings.Repeat("0", 32), strings.Repeat("0", 36), strings.Repeat("-", 36),
		"{" + sampleIDText + "}", "urn:uuid:" + sampleIDText, " " + sampleIDText, sampleIDText + "\n",
	}
	for i := range sampleIDText {
		refused = append(refused, sampleIDText[:i], withByte(sampleIDText, i, 'g'), withByte(sampleIDText, i, ' '))
		if sampleIDText[i] == '-' {
			refused = append(refused, withByte(sampleIDText, i, '0'))
		} else {
			refused = append(refused, withByte(sampleIDText, i, '-'))
		}
	}
	for _, s := range refused {
		id, err := codeq.ParseID(s)
		require.ErrorIs(t, err, codeq.ErrInvalid, "%q", s)
		require.Zero(t, id, "%q", s)
		id = sampleID
		require.Error(t, id.UnmarshalText([]byte(s)))
		require.Equal(t, sampleID, id, "a refused text changes nothing: %q", s)
		var invalid *codeq.InvalidError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "ID", invalid.Field)
		require.Equal(t, s, invalid.Value)
	}
}

func TestReceiptText(t *testing.T) {
	require.Equal(t, sampleReceiptText, sampleReceipt.String())
	rapid.Check(t, func(t *rapid.T) {
		r := codeq.Receipt{ID: drawAnyID(t), Token: rapid.OneOf(rapid.Uint64Range(0, 9), rapid.Uint64()).Draw(t, "token")}
		b, err := r.MarshalText()
		require.NoError(t, err)
		require.Equal(t, r.String(), string(b))
		got := sampleReceipt
		require.NoError(t, got.UnmarshalText(b))
		require.Equal(t, r, got)
		b, err = json.Marshal(r)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(b, &got))
		require.Equal(t, r, got)
	})
}

func TestReceiptTextRefused(t *testing.T) {
	refused := []string{"", ".", sampleIDText, sampleIDText + ".1", sampleReceiptText + "0", strings.Repeat("0", len(sampleReceiptText))}
	for i := range sampleReceiptText {
		refused = append(refused, sampleReceiptText[:i], withByte(sampleReceiptText, i, 'x'))
	}
	for _, s := range refused {
		for _, before := range []codeq.Receipt{{}, {ID: codeq.ID{1}, Token: 1}} {
			r := before
			require.ErrorIs(t, r.UnmarshalText([]byte(s)), codeq.ErrInvalid, "%q", s)
			require.Equal(t, before, r, "a refused text changes nothing: %q", s)
		}
	}
}

func TestIDTime(t *testing.T) {
	require.Equal(t, time.UnixMilli(0x0193b3c01234).UTC(), sampleID.Time())
}
