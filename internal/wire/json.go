package wire

import "encoding/json"

// AppendJSON appends the JSON form of v, which must have one, up to the end of the message or in a
// string of its own. Invalid UTF-8 in its strings arrives as U+FFFD.
func AppendJSON(dst []byte, v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("codeq: a value without a JSON form: " + err.Error())
	}
	return append(dst, b...)
}

// JSON decodes b, which r has read, into v.
func (r *Reader) JSON(b []byte, v any) {
	if json.Unmarshal(b, v) != nil {
		r.Fail()
	}
}
