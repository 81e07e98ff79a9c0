package codeqweb

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"strconv"
	"strings"

	"codeq"
)

// The cursor of a page has the names of the task before it, tenant and group, too. With
// Options.Redact a viewer gets cursors that are encrypted, with a key of the Dashboard, and bound
// to their list. The length of one does not tell that of a name.

// A cursor is filled up to a multiple of cursorStep before it is encrypted.
const cursorStep = 256

// newSealer returns a cipher with a new key.
func newSealer() cipher.AEAD {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // it returns no error
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // the key has an allowed size
	}
	sealer, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		panic(err) // the cipher is AES
	}
	return sealer
}

// sealCursor returns a cursor of a list as viewers get it; "" stays.
func (d *Dashboard) sealCursor(cursor, list string) string {
	if d.opts.Redact == nil || cursor == "" {
		return cursor
	}
	filled := make([]byte, (len(cursor)/cursorStep+1)*cursorStep)
	copy(filled, cursor)
	return base64.RawURLEncoding.EncodeToString(d.sealer.Seal(nil, nil, filled, []byte(list)))
}

// openCursor is the reverse of sealCursor.
func (d *Dashboard) openCursor(sealed, list string) (string, error) {
	if d.opts.Redact == nil || sealed == "" {
		return sealed, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(sealed)
	if err == nil {
		b, err = d.sealer.Open(nil, nil, b, []byte(list))
	}
	if err != nil {
		return "", invalid("cursor", "one of the same list, that this dashboard has made since the start of its process")
	}
	return strings.TrimRight(string(b), "\x00"), nil
}

// listName identifies the list of a cursor.
func listName(o *codeq.PageOptions) string {
	return "list, newest " + strconv.FormatBool(o.Newest) + ": " + filterQuery(o.TaskFilter).Encode()
}

// bulkName identifies the tasks of the cursor of a bulk change.
func bulkName(action codeq.BulkAction, f *codeq.TaskFilter) string {
	return action.String() + ": " + filterQuery(*f).Encode()
}
