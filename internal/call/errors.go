package call

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"codeq/internal/base"
	"codeq/internal/cluster"
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// Errors travel between nodes as a code and a text.

// SentErrors are those that callers branch on, by code. cluster.ErrBehind is sent as ErrNotLeader,
// which every build repeats; the text tells them apart.
var SentErrors = [...]error{
	nil, base.ErrEmpty, base.ErrLeaseLost, base.ErrNotFound, base.ErrNotWaiting, base.ErrCanceled,
	base.ErrNotLeader, base.ErrUncertain, base.ErrCorrupt,
	base.ErrDiskFull, base.ErrNotMember, base.ErrShardCount, base.ErrNoMajority, base.ErrCannotLead,
	// Nodes do not send these to each other, but to programs beside them (EncodeOwnError).
	base.ErrClosed, base.ErrFailed, base.ErrNotServed, base.ErrNoCluster, base.ErrFormat, base.ErrLocked,
	fs.ErrExist, fs.ErrNotExist, fs.ErrPermission,
	base.ErrStalled,
}

const (
	CodeNotLeader = 6 // in SentErrors
	codeUncertain = 7
	FirstOfOwn    = 14 // of those that are sent to programs only
)

const (
	codeLeaseCanceled = 100 + iota // base.ErrLeaseLost and base.ErrCanceled
	CodeDuplicate
	CodeInvalid
	codeIncarnationOver
	codePowerLost // base.ErrNotLeader and base.ErrPowerLost
	codeOldCopy
)

// EncodeError encodes an error for another node. Its caller does so for those with CodeDuplicate
// and CodeInvalid, which have types of the root.
func EncodeError(err error) (code byte, text string) {
	var over *keys.IncarnationOverError
	switch {
	case errors.As(err, &over):
		return codeIncarnationOver, string(wire.AppendJSON(nil, over))
	case errors.Is(err, base.ErrUncertain): // whatever the cause, it is not certain that nothing was stored
		return codeUncertain, err.Error()
	case errors.Is(err, base.ErrLeaseLost) && errors.Is(err, base.ErrCanceled):
		return codeLeaseCanceled, err.Error()
	case errors.Is(err, base.ErrNotLeader) && errors.Is(err, base.ErrPowerLost):
		return codePowerLost, err.Error()
	case errors.Is(err, base.ErrOldCopy):
		return codeOldCopy, err.Error()
	case errors.Is(err, cluster.ErrBehind):
		return CodeNotLeader, err.Error()
	case errors.Is(err, base.ErrClosed), errors.Is(err, base.ErrFailed): // another node will lead
		return EncodeError(fmt.Errorf("%w: %s", base.ErrNotLeader, err.Error()))
	}
	return encodeSentinel(err, 1, FirstOfOwn)
}

// encodeSentinel encodes an error as the first of some of SentErrors that it matches.
func encodeSentinel(err error, from, to int) (code byte, text string) {
	for code := from; code < to; code++ {
		if errors.Is(err, SentErrors[code]) {
			return byte(code), err.Error()
		}
	}
	return 0, err.Error()
}

// EncodeOwnError encodes an error that only programs beside the process may be sent; 0: it is none.
func EncodeOwnError(err error) (code byte, text string) {
	if errors.Is(err, base.ErrUncertain) {
		return 0, ""
	}
	return encodeSentinel(err, FirstOfOwn, len(SentErrors))
}

// DecodeError is the reverse of EncodeError and EncodeOwnError.
func DecodeError(code byte, text string) error {
	switch {
	case text == cluster.ErrMalformedCall.Error(): // what this build sends can be read
		return base.WithText(text+": it runs another version", base.ErrFormat)
	case code == codeIncarnationOver:
		return DecodeDetails(text, new(keys.IncarnationOverError))
	case code == codePowerLost:
		return base.WithText(text, base.ErrNotLeader, base.ErrPowerLost)
	case code == codeOldCopy:
		return base.WithText(text, base.ErrOldCopy)
	case code == codeLeaseCanceled:
		return base.WithText(text, base.ErrLeaseLost, base.ErrCanceled)
	case code == CodeNotLeader && strings.Contains(text, cluster.ErrBehind.Error()):
		return base.WithText(text, cluster.ErrBehind)
	case int(code) < len(SentErrors) && code > 0:
		return base.WithText(text, SentErrors[code])
	}
	return base.WithText(text)
}

// DecodeDetails reads an error that was sent with its fields. Any other text is an error without a
// code.
func DecodeDetails(text string, err error) error {
	if json.Unmarshal([]byte(text), err) != nil {
		return DecodeError(0, text)
	}
	return err
}

// AppendOutcome appends the outcome of one of several operations, for ReadOutcome.
func AppendOutcome(dst []byte, err error, encode func(error) (code byte, text string)) []byte {
	if dst = wire.AppendBool(dst, err != nil); err == nil {
		return dst
	}
	code, text := encode(err)
	return wire.AppendBytes(append(dst, code), text)
}

// ReadOutcome reads what AppendOutcome has appended.
func ReadOutcome(r *wire.Reader, decode func(code byte, text string) error) error {
	if !r.Bool() {
		return nil
	}
	return decode(r.Byte(), r.String())
}

// WholeFailure is why n operations of a call must all be tried again: their shard has decided none,
// or it is not known which; nil: it has decided all.
func WholeFailure(n int, outcome func(i int) error) (whole error) {
	decided := false
	for i := range n {
		switch err := outcome(i); {
		case !isOfShard(err):
			decided = true
		case whole == nil || errors.Is(err, base.ErrUncertain):
			whole = err
		}
	}
	if decided && whole != nil && !errors.Is(whole, base.ErrUncertain) {
		return fmt.Errorf("%w: of a part: %s", base.ErrUncertain, whole.Error())
	}
	return whole
}

// isOfShard reports whether an error says that a shard has not decided an operation, or that it is
// not known whether it has.
func isOfShard(err error) bool {
	for _, is := range [...]error{base.ErrUncertain, base.ErrNotLeader, base.ErrFailed, base.ErrClosed} {
		if errors.Is(err, is) {
			return true
		}
	}
	return false
}
