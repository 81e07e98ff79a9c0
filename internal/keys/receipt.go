package keys

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// Receipt names one lease of one task.
type Receipt struct {
	ID    ID
	Token uint64 // larger with every lease of the task
}

// String returns the text form, ID.token.
func (r Receipt) String() string { return fmt.Sprintf("%s.%016x", FormatID(r.ID), r.Token) }

// ParseReceipt reads the text form.
func ParseReceipt(text []byte) (r Receipt, ok bool) {
	var token [8]byte
	if len(text) != IDTextLen+1+2*len(token) || text[IDTextLen] != '.' {
		return r, false
	}
	id, ok := ParseID(text[:IDTextLen])
	_, err := hex.Decode(token[:], text[IDTextLen+1:])
	return Receipt{id, binary.BigEndian.Uint64(token[:])}, ok && err == nil
}

// Duplicate says that an idempotency key is taken, or that a task has got a signal before.
type Duplicate struct {
	Key    string
	Signal string // its name; "": of a key
	ID     ID     // of the task that has the key, or has got the signal
}

func (d *Duplicate) Error() string {
	if d.Signal != "" {
		return "task " + FormatID(d.ID) + " has got signal " + d.Signal
	}
	return "idempotency key " + d.Key + " is taken by task " + FormatID(d.ID)
}
