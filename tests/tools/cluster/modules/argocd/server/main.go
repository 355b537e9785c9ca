// Command argocd is Argo CD's application controller and repository server, and no other of its components: the API
// server, single sign-on, notifications and the command line are half of what would be compiled.
package main

import (
	"log"
	"os"
	"path/filepath"

	controller "github.com/argoproj/argo-cd/v3/cmd/argocd-application-controller/commands"
	askpass "github.com/argoproj/argo-cd/v3/cmd/argocd-git-ask-pass/commands"
	reposerver "github.com/argoproj/argo-cd/v3/cmd/argocd-repo-server/commands"
	"github.com/spf13/cobra"
)

// As in Argo CD's own binary, the name by which it is called chooses the component.
var components = map[string]func() *cobra.Command{
	"argocd-application-controller": controller.NewCommand,
	"argocd-repo-server":            reposerver.NewCommand,
	"argocd-git-ask-pass":           askpass.NewCommand,
}

func main() {
	name := filepath.Base(os.Args[0])
	component, known := components[name]
	if !known {
		log.Fatalf("no component %q of Argo CD is in this program", name)
	}
	if component().Execute() != nil {
		os.Exit(1)
	}
}
