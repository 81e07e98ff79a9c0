package keys

import "encoding/binary"

// FormatOfSteps is the first format that has steps.
const FormatOfSteps = 8

// StepLen is the length of the key of a step.
const StepLen = 1 + IDLen + 2

// AppendStep appends the key of a step of a task. The steps of a task are adjacent, in order.
func AppendStep(dst []byte, id ID, number uint16) []byte {
	return binary.BigEndian.AppendUint16(append(append(dst, Step), id[:]...), number)
}

// ParseStep reads the key of a step.
func ParseStep(key []byte) (id ID, number uint16, err error) {
	if len(key) != StepLen || key[0] != Step {
		return id, 0, malformed("step", key)
	}
	copy(id[:], key[1:])
	return id, binary.BigEndian.Uint16(key[1+IDLen:]), nil
}
