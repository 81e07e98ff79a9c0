package keys

import "encoding/binary"

// The first formats that have steps, kinds of tasks, logs of tasks, and counts of dead letters.
const (
	FormatOfSteps     = 8
	FormatOfKinds     = 8
	FormatOfLogs      = 8
	FormatOfDeadKinds = 8
)

// StepLen is the length of the key of a step.
const StepLen = 1 + IDLen + 2

// AppendStep appends the key of a step of a task. The steps of a task are adjacent, in order.
func AppendStep(dst []byte, id ID, number uint16) []byte {
	return binary.BigEndian.AppendUint16(append(append(dst, Step), id[:]...), number)
}

// The numbers, in place of that of a step, in the keys of the signals and the cursors of a task.
const (
	CursorsNumber = 0xfffe
	SignalsNumber = 0xffff
)

// ParseStep reads the key of a step.
func ParseStep(key []byte) (id ID, number uint16, err error) {
	if len(key) != StepLen || key[0] != Step {
		return id, 0, malformed("step", key)
	}
	copy(id[:], key[1:])
	return id, binary.BigEndian.Uint16(key[1+IDLen:]), nil
}
