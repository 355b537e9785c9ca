// Command kstatus says what Helm 4 and Flux read from objects, with the library that both use: it takes a stream of JSON
// objects and answers each with a line of JSON.
package main

import (
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func main() {
	objects, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var text json.RawMessage
		if err := objects.Decode(&text); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		var object unstructured.Unstructured
		if err := object.UnmarshalJSON(text); err != nil {
			log.Fatal(err)
		}
		result, err := status.Compute(&object)
		if err != nil {
			log.Fatal(err)
		}
		if err := answers.Encode(map[string]string{"status": result.Status.String(), "message": result.Message}); err != nil {
			log.Fatal(err)
		}
	}
}
